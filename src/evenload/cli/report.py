"""`evenload report`: what a recording, an out-of-memory message or allocator settings say."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from evenload.cli._shared import JsonFlag, say, say_json, warn
from evenload.errors import ANSWER_NO, EvenloadError, Notice
from evenload.files import read_text
from evenload.ledger.oom import OutOfMemory, read_oom, without_tips
from evenload.ledger.oom_reasons import explain
from evenload.ledger.settings import CUDA, NPU, VARIABLES, AllocConf, read_alloc_conf
from evenload.ledger.settings_files import alloc_confs_in, read_alloc_conf_file
from evenload.report import alloc_conf as alloc_conf_report
from evenload.report import oom as oom_report

OomOption = Annotated[
    str | None,
    typer.Option(
        "--oom", metavar="FILE|-", help="Explain the out-of-memory messages in a log; - reads them from stdin."
    ),
]
AllocConfOption = Annotated[
    str | None,
    typer.Option(
        "--alloc-conf",
        metavar="TEXT|FILE",
        help="Allocator settings (PYTORCH_ALLOC_CONF, MS_ALLOC_CONF): the text, or a script that sets them. "
        "Alone: check them. With --oom: what was on.",
    ),
]


def run(*, oom: OomOption = None, alloc_conf: AllocConfOption = None, json: JsonFlag = False) -> None:
    """Say what out-of-memory messages and allocator settings mean."""
    if oom is not None:
        _explain_oom(oom, alloc_conf, json=json)
    elif alloc_conf is not None:
        _check_settings(alloc_conf, json=json)
    else:
        raise EvenloadError(
            "there is nothing to report on",
            where="command line",
            fix="give --oom FILE, or --alloc-conf TEXT",
        )


def _explain_oom(source: str, given: str | None, *, json: bool) -> None:
    text = _read(source)
    messages = read_oom(text, place="stdin" if source == "-" else source)
    conf, notices = _settings_that_were_on(messages, text, given)
    warn(notices)
    explanations = [explain(message, conf) for message in messages]
    if json:
        say_json(oom_report.as_json(explanations, conf))
    else:
        say(oom_report.as_text(explanations, conf))


def _settings_that_were_on(
    messages: Sequence[OutOfMemory], text: str, given: str | None
) -> tuple[AllocConf | None, tuple[Notice, ...]]:
    """The settings as the user gives them, else as the log shows them, else as this shell has them."""
    if given is not None:
        confs, notices = _confs(given)
        return _of_device(messages, confs), notices
    in_log = alloc_confs_in(without_tips(text), place="log").confs
    here = [read_alloc_conf(os.environ[name], variable=name) for name in VARIABLES if name in os.environ]
    return _of_device(messages, in_log) or _of_device(messages, here), ()


def _of_device(messages: Sequence[OutOfMemory], confs: Sequence[AllocConf]) -> AllocConf | None:
    """The last settings that the allocator of the messages reads."""
    npu = messages[0].device.startswith("npu")
    names = [name for name, family in VARIABLES.items() if family is CUDA or (npu and family is NPU)]
    return next((conf for conf in reversed(confs) if conf.variable in names), None)


def _check_settings(given: str, *, json: bool) -> None:
    confs, notices = _confs(given)
    if json:
        say_json(alloc_conf_report.as_json(confs, notices))
    else:
        say(alloc_conf_report.as_text(confs, notices))
    if notices:
        raise typer.Exit(ANSWER_NO)


def _confs(given: str) -> tuple[list[AllocConf], tuple[Notice, ...]]:
    """Settings from a text or from a file."""
    if _is_file(given):
        file = read_alloc_conf_file(given)
        return list(file.in_force.values()), file.notices
    conf = read_alloc_conf(given)
    return [conf], conf.notices


def _is_file(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False


def _read(source: str) -> str:
    if source != "-":
        return read_text(source)
    text = sys.stdin.read()
    if not text.strip():
        raise EvenloadError("nothing came in", where="stdin", fix="pipe the log into it: evenload report --oom - < log")
    return text
