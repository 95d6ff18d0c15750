"""Settings of a run: what paths in a file mean."""

from evenload.runtime.settings import read_run


def settings_file(directory):
    directory.mkdir(parents=True)
    file = directory / "settings.yaml"
    file.write_text('data: ["../texts/*.md", /data/a.txt]\ncheckpoints: saved\nmemory_file: ../memory.json\n')
    return file


def test_paths_are_beside_the_file_and_short_where_the_run_is(tmp_path, monkeypatch):
    file = settings_file(tmp_path / "work" / "run")
    monkeypatch.chdir(tmp_path)
    settings = read_run(file)
    assert settings.data == ("work/texts/*.md", "/data/a.txt")
    assert (settings.checkpoints, settings.memory_file) == ("work/run/saved", "work/memory.json")


def test_above_a_linked_directory_is_above_what_it_leads_to(tmp_path, monkeypatch):
    settings_file(tmp_path / "real" / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link").symlink_to(tmp_path / "real" / "run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    settings = read_run(tmp_path / "elsewhere" / "link" / "settings.yaml")
    assert settings.data[0] == str(tmp_path / "real" / "texts" / "*.md")
