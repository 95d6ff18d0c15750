"""`evenload report` through the door: messages, settings, exit codes."""

import io
import json

import pytest
from tests.ledger import oom_texts as texts
from tests.ledger.ledgers import step
from tests.ledger.snapshots import Pretended, dump, snapshot, training
from tests.report.test_ledger import leaking

from evenload.cli.main import main
from evenload.ledger.files import write_ledger
from evenload.ledger.settings import VARIABLES
from evenload.units import GIB


@pytest.fixture
def run(capsys, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def run(*words, stdin=""):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(["report", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_an_out_of_memory_message_is_explained_from_a_pipe(run):
    code, out, err = run("--oom", "-", stdin=texts.FRAGMENTED)
    assert (code, err) == (0, "")
    assert "cuda:3 on rank 3 had no room for 2.00 GiB" in out
    assert 'export PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"' in out


def test_json_has_the_same_numbers(run, tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(texts.FRAGMENTED)
    code, out, _ = run("--oom", log, "--json")
    [message] = json.loads(out)["oom"]
    assert (code, message["unallocated"], message["reason"]) == (0, round(17.5 * GIB), "fragmentation")


ON = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@pytest.mark.parametrize("way", ["flag", "text only", "file", "log", "environment"])
def test_a_setting_that_is_on_is_not_advised_wherever_it_was_said(run, tmp_path, monkeypatch, way):
    script = tmp_path / "run.sh"
    script.write_text(f"export {ON}\n")
    words = {"flag": ["--alloc-conf", ON], "text only": ["--alloc-conf", ON.partition("=")[2]]}.get(way, [])
    words = ["--alloc-conf", script] if way == "file" else words
    stdin = f"+ export {ON}\n{texts.FRAGMENTED}" if way == "log" else texts.FRAGMENTED
    if way == "environment":
        monkeypatch.setenv(*ON.split("="))
    code, out, _ = run("--oom", "-", "--json", *words, stdin=stdin)
    answer = json.loads(out)
    assert code == 0
    assert answer["settings"] == {"expandable_segments": "True"}
    assert [advice["setting"] for advice in answer["oom"][0]["advice"]] == [None, None]


def test_settings_of_another_allocator_are_not_taken_for_those_of_the_device(run):
    _, out, _ = run("--oom", "-", "--json", "--alloc-conf", "MS_ALLOC_CONF=enable_vmm:True", stdin=texts.FRAGMENTED)
    assert json.loads(out)["settings"] is None
    npu = "PYTORCH_NPU_ALLOC_CONF=expandable_segments:True"
    _, out, _ = run("--oom", "-", "--json", "--alloc-conf", npu, stdin=texts.NPU)
    assert json.loads(out)["settings"] == {"expandable_segments": "True"}


def test_settings_alone_are_checked(run, tmp_path):
    code, out, err = run("--alloc-conf", "expandable_segments:True")
    assert (code, err) == (0, "")
    assert "nothing is wrong" in out
    code, out, _ = run("--alloc-conf", "expandable_segments=True")
    assert code == 1
    assert "write expandable_segments:True" in out
    script = tmp_path / "run.sh"
    script.write_text("export MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF=memory_tracker:True\n")
    code, out, _ = run("--alloc-conf", script, "--json")
    answer = json.loads(out)
    assert code == 1
    assert "wipes enable_vmm of line 1" in answer["warnings"][0]["fact"]
    assert answer["variables"] == [
        {"variable": "MS_ALLOC_CONF", "settings": {"memory_tracker": "True"}, "accepted": True}
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "there is nothing to report on"),
        (("--oom", "-"), "nothing came in"),
        (("--oom", "no/such.log"), "there is no such file"),
        (("--oom", "."), "cannot read the file"),
        (("no/such.ledger",), "there is no such file"),
        (("."), "this is a directory"),
        (("LEDGER", "--at", "-1"), "there is no event -1"),
        (("LEDGER", "--at", "9999"), "there is no event 9999"),
        (("LEDGER", "--memory", "lots"), "'lots' is not a size"),
        (("LEDGER", "--oom", "-"), "two questions"),
        (("TEXT",), "holds no allocations"),
        (("SAMPLES",), "no amount of memory"),
    ],
)
def test_mistakes_end_in_one_message_and_exit_code_2(run, tmp_path, words, says):
    write_ledger(tmp_path / "run.ledger", step())
    (tmp_path / "text").write_text("hello")
    (tmp_path / "samples").write_text('{"MiB": ["x"]}')
    names = {"LEDGER": "run.ledger", "TEXT": "text", "SAMPLES": "samples"}
    code, out, err = run(*(tmp_path / names[word] if word in names else word for word in words))
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_a_log_without_a_message_is_wrong_input(run):
    code, _, err = run("--oom", "-", stdin="all is well\n")
    assert code == 2
    assert "holds no out-of-memory message" in err


def test_a_ledger_is_reported_on_and_json_has_the_same_numbers(run, tmp_path):
    path = tmp_path / "run.ledger"
    write_ledger(path, step())
    code, out, err = run(path)
    assert (code, err) == (0, "")
    assert "held             250 B" in out
    assert "run.ledger: recorded of train.py" in out
    code, out, _ = run(path, "--json")
    assert (code, json.loads(out)["peaks"]["held"]) == (0, 250)
    assert json.loads(run(path, "--at", 5, "--json")[1])["at"]["bytes"] == 180


def test_a_leak_is_the_answer_no(run, tmp_path):
    path = tmp_path / "run.ledger"
    write_ledger(path, leaking())
    code, out, _ = run(path, "--memory", "1GB")
    assert code == 1
    assert "held by history[3]" in out
    assert "the device is full at step" in out
    assert run(path, "--json")[0] == 1


def test_a_ledger_that_broke_off_is_read_with_a_warning(run, tmp_path):
    path = tmp_path / "run.ledger"
    write_ledger(path, step())
    raw = path.read_bytes()
    path.write_bytes(raw[: -5 * 64] + b"\0" * 64)
    code, out, err = run(path)
    assert code == 0
    assert "broken off" in out
    assert "did not end by itself" in err


def test_a_snapshot_of_several_devices_and_a_table_are_read(run, tmp_path):
    small, large = Pretended(0), training()
    large.device = 1
    small.alloc(77)
    path = dump(tmp_path / "snap.pickle", snapshot(small, large))
    assert json.loads(run(path, "--json")[1])["device"] == "cuda:1"
    assert json.loads(run(path, "--device", 0, "--json")[1])["peaks"]["held"] == 77
    assert run(path, "--device", 5)[0] == 2


def test_a_device_is_refused_where_there_are_none_to_choose_among(run, tmp_path):
    path, samples = tmp_path / "run.ledger", tmp_path / "samples.json"
    write_ledger(path, step())
    samples.write_text(json.dumps({"MiB": [49258, 61558, 76124]}))
    for file in (path, samples):
        code, out, err = run(file, "--device", 0)
        assert (code, out) == (2, "")
        assert "--device: --device chooses among the devices of a snapshot" in err
        assert "leave --device out" in err


def test_traces_and_tables_are_written_and_not_overwritten(run, tmp_path):
    path = tmp_path / "run.ledger"
    write_ledger(path, step())
    trace, table = tmp_path / "out" / "trace.json", tmp_path / "table.csv"
    code, _, err = run(path, "--trace", trace, "--csv", table)
    assert code == 0
    assert err.count("wrote") == 2
    assert json.loads(trace.read_text())["traceEvents"]
    assert table.read_text().startswith("bytes,category")
    code, _, err = run(path, "--csv", table)
    assert code == 2
    assert "--force" in err
    assert run(path, "--csv", table, "--force")[0] == 0


def test_settings_that_were_on_are_not_advised_for_a_ledger(run, tmp_path):
    value = snapshot(training())
    settings = value.pop("allocator_settings")
    path = dump(tmp_path / "snap.pickle", value)
    assert "expandable_segments:True makes less of it, unless it is on already" in run(path)[1]
    path = dump(tmp_path / "snap.pickle", value | {"allocator_settings": settings})
    assert "fragmentation: set expandable_segments:True" in run(path)[1]
    assert "set expandable_segments:True" in run(path, "--alloc-conf", "backend:native")[1]
    assert "although segments can grow" in run(path, "--alloc-conf", "expandable_segments:True")[1]


@pytest.mark.parametrize(
    "told",
    [
        {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}},
        {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": True}},
        {"segments": [{"device": 0, "total_size": 2**25, "is_expandable": True, "blocks": []}]},
    ],
)
def test_what_a_snapshot_itself_says_was_on_is_not_advised(run, tmp_path, told):
    value = snapshot(training())
    del value["allocator_settings"]
    told = told | {"segments": [*value["segments"], *told.get("segments", [])]}
    path = dump(tmp_path / "snap.pickle", value | told)
    assert "although segments can grow" in run(path)[1]
    assert "although segments can grow" in run(path, "--alloc-conf", "enable_vmm:True")[1]  # of another allocator


def test_names_from_a_foreign_file_do_nothing_to_the_terminal_or_to_json(run, tmp_path):
    value = snapshot(training())
    for event in value["device_traces"][0]:
        for one in event["frames"]:
            one.update(filename="/x/\x1b[31mevil\udc80.py", name="a\nb")
    path = dump(tmp_path / "snap.pickle", value)
    code, out, _ = run(path)
    assert code == 0
    assert r"/x/\x1b[31mevil\udc80.py:40 a\nb" in out
    assert run(path, "--json", "--csv", tmp_path / "table.csv", "--trace", tmp_path / "trace.json")[0] == 0


def test_samples_over_time_are_judged(run, tmp_path):
    path = tmp_path / "samples.json"
    samples = {"MiB": [49258, 61558, 76124], "event": "after each checkpoint save", "device_MiB": 81559}
    path.write_text(json.dumps(samples))
    code, out, _ = run(path)
    assert code == 1
    assert "memory grows after each checkpoint save" in out
    assert "12.01 GiB, 14.22 GiB" in out
    assert "the next one is more than the device has left" in out
    code, out, _ = run(path, "--json")
    assert json.loads(out)["increments"] == [12300 * 2**20, 14566 * 2**20]
    path.write_text('{"baseline_GB": [30, 30, 30], "peak_GB": [33, 52, 80]}')
    code, out, _ = run(path, "--json")
    assert (code, json.loads(out)["trend"]) == (0, "imbalance")


def test_no_settings_are_nothing_wrong(run):
    code, _, err = run("--alloc-conf", "")
    assert (code, err) == (0, "")
