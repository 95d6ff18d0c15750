"""From a layer table and flags to a profile and a plan: for verbs that plan or simulate without a model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from evenload.cli.flags import Flags
from evenload.cli.inputs import read_settings, read_setup
from evenload.errors import EvenloadError, Notice, relocate
from evenload.files import parse_json
from evenload.plan.layer_setting import LayerSetting
from evenload.plan.layout import Layout
from evenload.plan.plan import Plan
from evenload.plan.policy import Policy, Recompute
from evenload.plan.recompute_lists import read_recompute_lists
from evenload.profile.given import GivenTable
from evenload.setup import Setup
from evenload.units import parse_bytes

TABLE_FLAGS: Final = frozenset(
    {"pp", "interleave", "micro_batches", "offset", "recompute", "schedule", "memory", "config"}
)
"""Flags that mean something over a table; the others describe a model's costs, which a table gives."""
IN_A_PLAN: Final = frozenset({"pp", "interleave", "offset", "recompute"})
"""Flags that a plan file answers itself."""
_PLAIN: Final = re.compile(r"[0-9]+\.?[0-9]*")
_PATHS: Final = {
    "$.select_recompute": "--select",
    "$.select_comm_recompute": "--comm",
    "$.recompute": "--recompute",
    "$.offset": "--offset",
    "$.pp_interleave_num": "--interleave",
    "$.interleave": "--interleave",
    "$.pp": "--pp",
    "$.micro_batches": "--micro-batches",
    "$.schedule": "--schedule",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """Recompute as counts: what `--recompute`, `--select` and `--comm` say when they are not one word for all."""

    recompute: str | None = None
    select: str | None = None
    comm: str | None = None

    @property
    def given(self) -> bool:
        """Whether anything is said."""
        return any(text is not None for text in (self.recompute, self.select, self.comm))

    def policy(self, layout: Layout) -> tuple[Policy, tuple[Notice, ...]]:
        """The layers behind every switch, and what the user should know.

        Raises:
            EvenloadError: a list that means nothing on this layout.
        """
        try:
            lists = read_recompute_lists(
                layout,
                recompute=_switch(self.recompute, "--recompute", {"full": True, "none": False}),
                select_recompute=_switch(self.select, "--select", {"all": True, "none": False}),
                select_comm_recompute=_switch(self.comm, "--comm", {"all": True, "none": False}),
            )
        except EvenloadError as error:
            raise error.at(flag_of(error.where)) from None
        return lists.policy(), tuple(relocate(notice, flag_of(notice.where)) for notice in lists.notices)


def split_recompute(flags: Flags, select: str | None, comm: str | None) -> tuple[Flags, Lists]:
    """Counts apart from the flags: `--recompute full` stays a flag, `--recompute '[2,1,0,0]'` does not."""
    word = flags.recompute
    if word is None or (word.lower() in set(Recompute) and select is None and comm is None):
        return flags, Lists(select=select, comm=comm)
    return replace(flags, recompute=None), Lists(recompute=word, select=select, comm=comm)


def refuse(flags: Flags, allowed: frozenset[str], why: str) -> None:
    """Raise for the first flag that is given and not allowed.

    Raises:
        EvenloadError: with the flag's name.
    """
    for name in flags.said():
        if name not in allowed:
            flag = f"--{name.replace('_', '-')}"
            raise EvenloadError(f"{flag} {why}", where="command line", fix=f"leave {flag} out")


def plan_over_table(table: GivenTable, flags: Flags, lists: Lists) -> tuple[Plan, tuple[Notice, ...]]:
    """The plan that a settings file (`--config`) or flags describe for the layers of a table.

    Raises:
        EvenloadError: a flag that says nothing here, or that cannot be meant.
    """
    refuse(flags, TABLE_FLAGS, "says nothing over a table, which gives the costs itself")
    try:
        return _of_file(flags.config, flags, lists) if flags.config else _of_flags(table, flags, lists)
    except EvenloadError as error:
        raise error.at(flag_of(error.where)) from None


def limit_in(text: str, unit: str) -> float:
    """A memory limit in the unit of a table; a plain number is in that unit already.

    Raises:
        EvenloadError: no positive size, or a size with a unit for a table whose own unit is not one.
    """
    size = parse_bytes(text, where="--memory")
    if unit == "bytes":
        return float(size)
    if _PLAIN.fullmatch(text.strip()):
        return float(text)
    try:
        return size / parse_bytes(f"1{unit}")
    except EvenloadError:
        raise EvenloadError(
            f"the table counts memory in {unit!r}, which {text!r} cannot be turned into",
            where="--memory",
            fix="give a plain number, or a memory_unit such as MB in the table",
        ) from None


def flag_of(where: str | None) -> str:
    """The flag behind a `$.path` of a value that was made of flags."""
    path = where or "command line"
    for name, flag in _PATHS.items():
        if path == name or path.startswith((f"{name}[", f"{name}.")):
            return flag + path.removeprefix(name)
    return path


def _of_file(path: str, flags: Flags, lists: Lists) -> tuple[Plan, tuple[Notice, ...]]:
    refuse(flags, TABLE_FLAGS - IN_A_PLAN, "is said by the plan file")
    if lists.given:
        raise EvenloadError("the plan file says what is recomputed", where=path, fix="leave --select and --comm out")
    reading = read_settings(path)
    return replace(reading.plan, setup=flags.over(reading.plan.setup)), reading.notices


def _of_flags(table: GivenTable, flags: Flags, lists: Lists) -> tuple[Plan, tuple[Notice, ...]]:
    setup, notices = read_setup(None, flags)
    layout, said = _layout(len(table.profile.blocks), setup, flags.offset)
    if flags.recompute is None:
        policy, more = lists.policy(layout)
    else:
        policy, more = Policy.everywhere(Recompute(flags.recompute.lower()), layout.num_layers), ()
    return Plan(setup=setup, layout=layout, policy=policy), (*notices, *said, *more)


def _layout(num_layers: int, setup: Setup, offset: str | None) -> tuple[Layout, list[Notice]]:
    """As even as layers allow, or as the offset says in MindFormers' terms."""
    if offset is None and setup.chunks > num_layers:
        raise EvenloadError(
            f"pp {setup.pp} x interleave {setup.interleave} needs {setup.chunks} chunks, there are {num_layers} layers",
            where="$.interleave" if setup.pp <= num_layers else "$.pp",
            fix=f"lower them until pp x interleave is at most {num_layers}, or say where layers go with --offset",
        )
    if offset is None:
        layout = Layout.even(num_layers, pp=setup.pp, interleave=setup.interleave)
        notices = layout.notices()
    else:
        given: Any = parse_json(offset, name="--offset")
        setting = LayerSetting(num_layers, pp=setup.pp, pp_interleave_num=setup.interleave, offset=given)
        layout, notices = setting.layout, setting.notices
    return layout, [relocate(notice, flag_of(notice.where)) for notice in notices]


def _switch(text: str | None, flag: str, words: dict[str, bool]) -> Any:
    """A word or a list as it is written on the command line."""
    if text is None:
        return False
    return words[text.lower()] if text.lower() in words else parse_json(text, name=flag)
