"""Allocator settings in scripts: every way to set them, and a later one that wipes an earlier one."""

import pytest

from evenload.errors import EvenloadError
from evenload.ledger.settings_files import alloc_confs_in, read_alloc_conf_file


def read(text):
    return alloc_confs_in(text, place="run.sh")


def notices(text):
    return [str(notice) for notice in read(text).notices]


def test_a_later_export_that_wipes_an_earlier_one_is_found():
    """The vendor's own warning: several settings must be set at once, separated by commas."""
    text = 'export MS_ALLOC_CONF="enable_vmm:True"\npython -V\nexport MS_ALLOC_CONF="memory_tracker:True"\n'
    assert notices(text) == [
        (
            "run.sh:3: this sets MS_ALLOC_CONF anew and wipes enable_vmm of line 1: a variable holds one text, and the "
            'last one counts\n  fix: write them at once: MS_ALLOC_CONF="enable_vmm:True,memory_tracker:True"'
        )
    ]
    assert read(text).in_force["MS_ALLOC_CONF"].settings == {"memory_tracker": "True"}


@pytest.mark.parametrize(
    "text",
    [
        "export MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF=$MS_ALLOC_CONF,memory_tracker:True\n",
        "export MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF+=,memory_tracker:True\n",
        (
            "export MS_ALLOC_CONF=enable_vmm:True\n"
            'export MS_ALLOC_CONF="${MS_ALLOC_CONF:+$MS_ALLOC_CONF,}memory_tracker:True"\n'
        ),
        "export MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF=${MS_ALLOC_CONF:-memory_tracker:True}\n",
        "export MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF=enable_vmm:False\n",
        "export MS_ALLOC_CONF=enable_vmm:True\n# export MS_ALLOC_CONF=memory_tracker:True\n",
        "export MS_ALLOC_CONF=enable_vmm:True # not MS_ALLOC_CONF=memory_tracker:True\n",
        (
            "if [ $TRACK ]; then\n  export MS_ALLOC_CONF=memory_tracker:True\nelse\n"
            "  export MS_ALLOC_CONF=enable_vmm:True\nfi\n"
        ),
        (
            "case $1 in\n  a) export MS_ALLOC_CONF=memory_tracker:True ;;\n"
            "  b) export MS_ALLOC_CONF=enable_vmm:True ;;\nesac\n"
        ),
        "export MS_ALLOC_CONF=enable_vmm:True\nexport PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n",
        (
            'import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n'
            'os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")\n'
        ),
        "echo nothing to see\n",
    ],
)
def test_what_repeats_adds_or_excludes_the_other_wipes_nothing(text):
    assert notices(text) == []


def test_an_assignment_after_the_branches_wipes_what_they_set():
    text = "if [ $T ]; then\n  export MS_ALLOC_CONF=memory_tracker:True\nfi\nexport MS_ALLOC_CONF=enable_vmm:True\n"
    [notice] = read(text).notices
    assert notice.where == "run.sh:4"
    assert "wipes memory_tracker of line 2" in notice.fact


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true", 32),
        ("PYTORCH_CUDA_ALLOC_CONF='expandable_segments:true' torchrun train.py", 26),
        ("torchrun --x 1 && PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true python a.py", 43),
        ('os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:true"', 42),
        ("os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', 'expandable_segments:true')", 51),
        ("ENV PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true", 29),
        ("ENV PYTORCH_CUDA_ALLOC_CONF expandable_segments:true", 29),
        ("setenv PYTORCH_CUDA_ALLOC_CONF expandable_segments:true", 32),
        ("  PYTORCH_CUDA_ALLOC_CONF: expandable_segments:true", 28),
        ('  "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true",', 31),
        ("docker run -e PYTORCH_CUDA_ALLOC_CONF=expandable_segments:true image", 39),
    ],
)
def test_every_way_to_set_a_variable_is_read_with_its_place(line, column):
    [notice] = read(f"\n{line}\n").notices
    assert notice.where == f"run.sh:2:{column + len('expandable_segments:')}"
    assert notice.fix == "write expandable_segments:True"


def test_a_line_that_goes_on_is_one_line():
    found = read(
        'export A=1 \\\n  PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True" \\\n  B=2\nexport MS_ALLOC_CONF=x:1'
    )
    assert [conf.variable for conf in found.confs] == ["PYTORCH_CUDA_ALLOC_CONF", "MS_ALLOC_CONF"]
    assert found.notices[0].where == "run.sh:4:22"


def test_two_names_of_the_same_settings_are_named():
    [notice] = read(
        "PYTORCH_ALLOC_CONF=expandable_segments:True\nPYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64\n"
    ).notices
    assert "reads only one of them (2.13: PYTORCH_CUDA_ALLOC_CONF)" in notice.fact


def test_the_name_that_pytorch_reads_is_the_one_that_is_said():
    import os
    import subprocess
    import sys

    both = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:65"}
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | both, capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == both["PYTORCH_CUDA_ALLOC_CONF"]


def test_files_that_are_no_text_are_wrong_input(tmp_path):
    path = tmp_path / "run.sh"
    with pytest.raises(EvenloadError, match="no such file"):
        read_alloc_conf_file(path)
    path.write_bytes(b"\0\1\2")
    with pytest.raises(EvenloadError, match="binary"):
        read_alloc_conf_file(path)
    path.write_text("MS_ALLOC_CONF=enable_vmm:True")
    assert read_alloc_conf_file(path).notices == ()


@pytest.mark.parametrize("line", ["{} = {}", "export {} = {}", "{}= {}", "  {} ={}"])
def test_spaces_around_the_sign_set_nothing_and_are_named(line):
    text = line.format("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert not [conf for conf in read(text).confs if conf.settings]
    (said,) = notices(text)
    assert "spaces stand around `=`" in said
    assert "write PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64" in said


@pytest.mark.parametrize(
    "text",
    [
        "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 ",
        'test "$PYTORCH_CUDA_ALLOC_CONF" = max_split_size_mb:64',
        "PYTORCH_CUDA_ALLOC_CONF= python train.py",
        "# PYTORCH_CUDA_ALLOC_CONF = max_split_size_mb:64",
    ],
)
def test_other_spaces_are_right(text):
    assert not notices(text)


def test_a_python_name_may_have_spaces_around_its_sign():
    assert not alloc_confs_in('PYTORCH_CUDA_ALLOC_CONF = "max_split_size_mb:64"', place="settings.py").notices


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (
            'export MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF="$MS_ALLOC_CONF,memory_tracker:True"\n',
            {"enable_vmm": "True", "memory_tracker": "True"},
        ),
        (
            "MS_ALLOC_CONF=enable_vmm:True\nMS_ALLOC_CONF+=,enable_vmm:False,memory_tracker:True\n",
            {"enable_vmm": "False", "memory_tracker": "True"},
        ),
        ("export MS_ALLOC_CONF=${MS_ALLOC_CONF:-enable_vmm:True}\n", {"enable_vmm": "True"}),
        (
            "MS_ALLOC_CONF=enable_vmm:True\nMS_ALLOC_CONF=${MS_ALLOC_CONF:-memory_tracker:True}\n",
            {"enable_vmm": "True"},
        ),
        (
            'os.environ["MS_ALLOC_CONF"] = "enable_vmm:True"\nos.environ.setdefault("MS_ALLOC_CONF", "")',
            {"enable_vmm": "True"},
        ),
        ("export MS_ALLOC_CONF=enable_vmm:True\nunset MS_ALLOC_CONF\n", None),
        ("MS_ALLOC_CONF=enable_vmm:True\nif [ $X ]; then\nunset MS_ALLOC_CONF\nfi\n", {"enable_vmm": "True"}),
        ('os.environ["MS_ALLOC_CONF"] = "enable_vmm:True"\nos.environ.pop("MS_ALLOC_CONF", None)\n', None),
        ("env:\n  - name: MS_ALLOC_CONF\n    value: 'enable_vmm:True'\n", {"enable_vmm": "True"}),
        ("  - name: MS_ALLOC_CONF\n  - name: OTHER\n    value: 'enable_vmm:True'\n", None),
        ("set -x MS_ALLOC_CONF enable_vmm:True\n", {"enable_vmm": "True"}),
        ('$env:MS_ALLOC_CONF = "enable_vmm:True"\n', {"enable_vmm": "True"}),
    ],
)
def test_what_is_in_force_in_the_end(text, settings):
    found = read(text)
    assert found.notices == ()
    conf = found.in_force.get("MS_ALLOC_CONF")
    assert (None if conf is None else conf.settings) == settings


@pytest.mark.parametrize(
    ("text", "wipes"),
    [
        ("MS_ALLOC_CONF=enable_vmm:True python a.py\nMS_ALLOC_CONF=memory_tracker:True python b.py\n", False),
        ("docker run -e MS_ALLOC_CONF=enable_vmm:True a\ndocker run -e MS_ALLOC_CONF=memory_tracker:True b\n", False),
        ("env MS_ALLOC_CONF=enable_vmm:True ./a\nexport MS_ALLOC_CONF=memory_tracker:True\n", False),
        ("export MS_ALLOC_CONF=enable_vmm:True\nMS_ALLOC_CONF=memory_tracker:True python b.py\n", True),
        ("MS_ALLOC_CONF=enable_vmm:True\nexport MS_ALLOC_CONF=memory_tracker:True X=1\n", True),
        (
            "export MS_ALLOC_CONF=enable_vmm:True\nunset MS_ALLOC_CONF\nexport MS_ALLOC_CONF=memory_tracker:True\n",
            False,
        ),
    ],
)
def test_what_only_one_command_saw_is_not_wiped(text, wipes):
    assert any("wipes enable_vmm" in notice for notice in notices(text)) == wipes
