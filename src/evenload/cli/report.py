"""`evenload report`: what a recording, an out-of-memory message or allocator settings say."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from evenload.cli._shared import ForceFlag, JsonFlag, remark, say, say_json, warn
from evenload.errors import ANSWER_NO, EvenloadError, Notice
from evenload.files import MAX_BYTES, read_text, write_text
from evenload.ledger.importing import read_allocations
from evenload.ledger.ledger import Ledger
from evenload.ledger.oom import OutOfMemory, read_oom, without_tips
from evenload.ledger.oom_reasons import explain
from evenload.ledger.series import Trend, judge
from evenload.ledger.series_files import looks_like_series, series_in
from evenload.ledger.settings import CUDA, MINDSPORE, NPU, VARIABLES, AllocConf, read_alloc_conf
from evenload.ledger.settings_files import alloc_confs_in, read_alloc_conf_file
from evenload.report import alloc_conf as alloc_conf_report
from evenload.report import ledger as ledger_report
from evenload.report import oom as oom_report
from evenload.report import series as series_report
from evenload.units import parse_bytes

FileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE", help="A ledger, a CUDA memory snapshot, a memory_block.csv, or samples over time as JSON."
    ),
]
AtOption = Annotated[int | None, typer.Option("--at", help="Event to explain instead of the peak.")]
MemoryOption = Annotated[
    str | None, typer.Option("--memory", help="Memory of the device, such as 80GiB: says when growth fills it.")
]
DeviceOption = Annotated[int | None, typer.Option("--device", help="Device of a snapshot that holds several.")]
TraceOption = Annotated[str | None, typer.Option("--trace", help="Write a Chrome trace, for ui.perfetto.dev.")]
CsvOption = Annotated[str | None, typer.Option("--csv", help="Write all allocations as a table.")]
OomOption = Annotated[
    str | None,
    typer.Option("--oom", metavar="FILE|-", help="Explain the out-of-memory messages in a log; - reads stdin."),
]
AllocConfOption = Annotated[
    str | None,
    typer.Option(
        "--alloc-conf",
        metavar="TEXT|FILE",
        help="Allocator settings (PYTORCH_ALLOC_CONF, MS_ALLOC_CONF): the text, or a script that sets them. "
        "Alone: check them. With FILE or --oom: what was on.",
    ),
]
_TAIL: Final = MAX_BYTES
"""Bytes of a log that are read, from its end: failures stand there."""


def run(
    file: FileArgument = None,
    *,
    at: AtOption = None,
    memory: MemoryOption = None,
    device: DeviceOption = None,
    trace: TraceOption = None,
    csv: CsvOption = None,
    oom: OomOption = None,
    alloc_conf: AllocConfOption = None,
    json: JsonFlag = False,
    force: ForceFlag = False,
) -> None:
    """Say where memory went: peaks, who holds them, what was not released; or what a failure or settings mean.

    Exits with 1 where something is not released, or settings are wrong.
    """
    if file is not None and oom is not None:
        raise EvenloadError("a file and --oom are two questions", where="command line", fix="leave one of them out")
    if file is not None:
        capacity = None if memory is None else parse_bytes(memory, where="--memory")
        if looks_like_series(_head(file)):
            if device is not None:
                raise EvenloadError(
                    "--device chooses among the devices of a snapshot, and this file has samples over time",
                    where="--device",
                    fix="leave --device out",
                )
            _judge_samples(file, json=json)
            return
        ledger = read_allocations(file, device=device)
        _write(ledger, trace, csv, force=force)
        _report_on(ledger, file, at, capacity, alloc_conf, json=json)
    elif oom is not None:
        _explain_oom(oom, alloc_conf, json=json)
    elif alloc_conf is not None:
        _check_settings(alloc_conf, json=json)
    else:
        raise EvenloadError(
            "there is nothing to report on",
            where="command line",
            fix="give a file, --oom FILE, or --alloc-conf TEXT",
        )


def _head(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(4096).decode("utf-8", errors="replace")
    except (OSError, ValueError):
        return ""  # reading it as a ledger says what is wrong


def _report_on(
    ledger: Ledger, file: str, at: int | None, capacity: int | None, alloc_conf: str | None, *, json: bool
) -> None:
    if at is not None and not 0 <= at <= ledger.end:
        raise EvenloadError(f"there is no event {at}", where="--at", fix=f"give a number from 0 to {ledger.end}")
    on = ledger.metadata.alloc_conf
    conf = None if on is None else read_alloc_conf(on)
    if alloc_conf is not None:
        confs, notices = _confs(alloc_conf)
        warn(notices)
        families = {"npu": (NPU, MINDSPORE)}.get(ledger.device.partition(":")[0], (CUDA,))
        conf = next((one for one in reversed(confs) if VARIABLES[one.variable] in families), conf)
    said = ledger_report.report(ledger, at=at, capacity=capacity, conf=conf)
    if json:
        say_json(ledger_report.as_json(said))
    else:
        warn(ledger.notices)
        say(ledger_report.as_text(said, _heading(ledger, file), here=str(Path.cwd())))
    if said.leaks:
        raise typer.Exit(ANSWER_NO)


def _heading(ledger: Ledger, file: str) -> str:
    metadata = ledger.metadata
    parts = [
        f"{file}: {metadata.origin}" + (f" of {' '.join(metadata.command)}" if metadata.command else ""),
        f"rank {metadata.rank} of {metadata.world}" if metadata.world > 1 else "",
        f"{len(ledger.allocations)} allocations",
        f"{ledger.steps} steps" if ledger.steps else "",
        "" if ledger.complete else "broken off",
    ]
    return ", ".join(part for part in parts if part)


def _write(ledger: Ledger, trace: str | None, csv: str | None, *, force: bool) -> None:
    if trace is None and csv is None:
        return
    from evenload.ledger.trace import chrome_trace, csv_table  # noqa: PLC0415  # only where it is asked for

    for path, text in ((trace, chrome_trace), (csv, csv_table)):
        if path is not None:
            write_text(path, text(ledger), force=force)
            remark(f"wrote {path}")


def _judge_samples(file: str, *, json: bool) -> None:
    series = series_in(read_text(file), place=file)
    judgement = judge(series)
    if json:
        say_json(series_report.as_json(series, judgement))
    else:
        say(series_report.as_text(series, judgement))
    if judgement.trend is Trend.GROWTH:
        raise typer.Exit(ANSWER_NO)


def _explain_oom(source: str, given: str | None, *, json: bool) -> None:
    text = _read_log(source)
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
    in_log = list(alloc_confs_in(without_tips(text), place="log").in_force.values())
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
        return bool(text.strip()) and Path(text).exists()
    except (OSError, ValueError):
        return False


def _read_log(source: str) -> str:
    """The end of a log; bytes that are no UTF-8, which logs hold now and then, are no reason to stop."""
    if source == "-":
        stream = getattr(sys.stdin, "buffer", None)
        text = sys.stdin.read() if stream is None else stream.read().decode("utf-8", errors="replace")
        if not text.strip():
            raise EvenloadError(
                "nothing came in", where="stdin", fix="pipe the log into it: evenload report --oom - < log"
            )
        return text
    try:
        with Path(source).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL))
            raw = file.read()
    except FileNotFoundError:
        raise EvenloadError("there is no such file", where=source, fix="check the path") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise EvenloadError(
            f"cannot read the file: {reason.lower()}", where=source, fix="check that it may be read"
        ) from None
    return raw.decode("utf-8", errors="replace")
