"""MindSpore's memory_block.csv in both layouts: the three peaks of its own analysis, counted again row by row."""

import csv
import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenload.errors import EvenloadError
from evenload.ledger.curve import live, peaks
from evenload.ledger.ledger import ALIVE
from evenload.ledger.mindspore_csv import memory_block_ledger, read_memory_block
from evenload.ledger.words import CATEGORIES, Category

DATA = Path(__file__).parents[1] / "data" / "ledger"
LAYOUTS = ["memory_block_2.7.csv", "memory_block_2.10.csv"]
HEAD = (
    "start_time_stamp,end_time_stamp,device_addr,stream_id,pool_type,size,actual_peak_memory,file_name,line_num,type,"
    "producer_task,task_name,node_name,graph_name,user_tasks,last_user_task,python_stack,\n"
)
NEVER = 2**63 - 1


def naive_peaks(text):
    """Needed, held and reserved, by looking at every stamp: the definitions and nothing else."""
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["pool_type"].startswith("Default")]
    stamps = range(200)
    held = [
        (int(row["start_time_stamp"]), int(row["end_time_stamp"]), int(row["size"]))
        for row in rows
        if row["start_time_stamp"] != "-1"
    ]
    needed = []
    for row in rows:
        users = [int(number) for number in re.findall(r"\d+", row["user_tasks"])]
        if users:
            needed.append((int(row["producer_task"] or row["start_time_stamp"]), max(users) + 1, int(row["size"])))
    return (
        max(sum(size for begin, end, size in needed if begin <= stamp < end) for stamp in stamps),
        max(sum(size for begin, end, size in held if begin <= stamp < end) for stamp in stamps),
        max(int(row["actual_peak_memory"]) for row in csv.DictReader(io.StringIO(text))),
    )


def row(start, end, size, *, made="", users="", kind="Kernel", stack="", pool="DefaultEnhancedAscendMemoryPool"):
    return f"{start},{end},0x1,0,{pool},{size},999999,m.cc,1,{kind},{made},MatMul,node,graph,{users},,{stack},\n"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_give_the_peaks_of_the_definitions(layout):
    found = peaks(read_memory_block(DATA / layout))
    assert (found.needed, found.held, found.reserved) == naive_peaks((DATA / layout).read_text())


def test_both_layouts_give_the_same_rows():
    old, new = (read_memory_block(DATA / layout) for layout in LAYOUTS)
    for column in ("nbytes", "allocated", "last_used", "freed", "category", "made"):
        assert getattr(old.allocations, column).tolist() == getattr(new.allocations, column).tolist()


BLOCKS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 60), st.integers(1, 10**6), st.lists(st.integers(0, 60), max_size=3)),
    min_size=1,
    max_size=12,
)


@given(blocks=BLOCKS)
@settings(max_examples=80, deadline=None)
def test_any_blocks_give_the_peaks_of_the_definitions(blocks):
    text = HEAD
    for number, (start, life, size, after) in enumerate(blocks):
        end = NEVER if number % 5 == 4 else start + life
        users = "{" + "-".join(str(start + 1 + later) for later in after) + "}" if after else ""
        text += row(start, end, size, made=start + 1, users=users)
    found = peaks(memory_block_ledger(text))
    assert (found.needed, found.held, found.reserved) == naive_peaks(text)


def test_a_block_keeps_its_node_task_type_and_python_lines():
    ledger = read_memory_block(DATA / LAYOUTS[0])
    made = [
        number
        for number in range(len(ledger.allocations))
        if ledger.module(number) == "Default/network/layers.1/MatMul-op1"
    ]
    [number] = made
    assert ledger.source(number) == "/home/me/model.py:41 construct"
    assert ledger.stack(number)[-1] == "/home/me/run.py:31 main"
    categories = {CATEGORIES[code] for code in ledger.allocations.category.tolist()}
    assert categories == {Category.PARAMETER, Category.INPUT, Category.TEMPORARY, Category.UNKNOWN}
    assert ledger.metadata.origin == "MindSpore memory tracker"


def test_what_lies_inside_a_larger_block_is_needed_and_not_held():
    text = HEAD + row(1, 40, 1000) + row(-1, -1, 700, made=5, users="{7}", kind="InSideSomas")
    found = peaks(memory_block_ledger(text))
    assert (found.needed, found.held) == (700, 1000)


def test_blocks_that_are_never_freed_stay():
    ledger = memory_block_ledger(HEAD + row(3, NEVER, 512, made=4, users="{9}"))
    assert ledger.allocations.freed.tolist() == [ALIVE]
    assert live(ledger, ledger.end - 1).tolist() == [0]


def test_other_pools_are_not_the_memory_of_the_device():
    text = HEAD + row(1, 9, 100) + row(1, 9, 5000, pool="Persistent")
    assert peaks(memory_block_ledger(text)).held == 100
    alone = HEAD + row(1, 9, 5000, pool="AscendMemoryPool")
    assert peaks(memory_block_ledger(alone)).held == 5000


def test_commas_in_a_stack_stay_in_it():
    stack = "File:/home/me/a.py;Line:3;Function:run(x, y)|"
    ledger = memory_block_ledger(HEAD + row(1, 9, 100, made=2, users="{3}", stack=stack))
    assert ledger.source(0) == "/home/me/a.py:3 run(x, y)"


def test_a_simple_tracker_gives_only_the_last_user():
    line = "1,9,0x1,0,Default,100,200,m.cc,1,Kernel,2,MatMul,node,graph,,6,,\n"
    assert memory_block_ledger(HEAD + line).allocations.last_used.tolist() == [7]


def test_an_empty_file_of_a_cpu_run_says_why():
    ledger = memory_block_ledger(HEAD)
    assert len(ledger.allocations) == 0
    assert "for devices only" in ledger.notices[0].fact
    assert peaks(ledger).held == 0
    no_lines = memory_block_ledger(HEAD + row(1, 9, 100))
    assert "no block has a Python line" in no_lines.notices[0].fact


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the file is empty"),
        ("a,b,c\n1,2,3\n", "no memory_block.csv"),
        (HEAD + "1,2\n", "memory_block.csv:2: the row has 2 cells for 17 columns"),
        (HEAD + row("x", 9, 100), "memory_block.csv:2: start_time_stamp is 'x'"),
        (HEAD + row(1, "nan", 100), "end_time_stamp is 'nan'"),
        (HEAD + row(1, 9, "inf"), "size is 'inf'"),
        (HEAD + row(1, 9, -100), "size is '-100'"),
        (HEAD + row(9, 3, 100), "before it is allocated"),
        (HEAD + row(NEVER, NEVER, 100), "start_time_stamp is '9223372036854775807'"),
        (HEAD + row(1, 9, 10**19), "size is '1000"),
        (HEAD + row(1, 9, 100, made=10**30), "producer_task is '1000"),
        (HEAD + row(1, 9, 100, users="{" + "1" * 5000 + "}"), "user_tasks is '1111"),
        (HEAD + row(1, 9, 100, stack="x" * 200_000), "field limit"),
        (HEAD + row(1, 9, 100) + row(1, 9, "1e400"), "memory_block.csv:3"),
    ],
)
def test_files_that_make_no_sense_are_wrong_input(text, says):
    with pytest.raises(EvenloadError) as caught:
        memory_block_ledger(text)
    assert says in str(caught.value)


def test_a_file_that_is_not_there_is_wrong_input(tmp_path):
    with pytest.raises(EvenloadError, match="no such file"):
        read_memory_block(tmp_path / "no.csv")
    with pytest.raises(EvenloadError, match="cannot read"):
        read_memory_block(tmp_path)
