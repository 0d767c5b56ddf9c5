import pytest

from sfiformer.presets import preset_names, read_preset
from sfiformer.schema import Layer


def test_bases_come_first():
    sources = [layer.source for layer in read_preset("peptides-struct")]
    assert sources == [
        "preset peptides-func-paper",
        "preset peptides-struct-paper",
        "preset peptides-struct",
    ]


def test_a_misspelt_name():
    with pytest.raises(ValueError, match=r"no preset 'peptide-func'; did you mean 'peptides-func'\?"):
        read_preset("peptide-func")


@pytest.mark.parametrize("name", ["mols.csv", "mols.csv.gz", "graphs.jsonl", "graphs.pt"])
def test_a_file_of_graphs_is_no_preset(name):
    message = f"^'{name}' is a file of graphs, not a preset: sfi train custom --data.path {name}$"
    with pytest.raises(ValueError, match=message):
        read_preset(name)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_graphs_in_json_are_to_be_lines(end):
    message = (
        rf"^'g.json{end}' is no preset, .* one graph a line, name it .jsonl, .* --data.path g.jsonl{end}$"
    )
    with pytest.raises(ValueError, match=message):
        read_preset(f"g.json{end}")


def test_the_folder_of_a_run_is_no_preset(tmp_path):
    (tmp_path / "config.yaml").write_text("base: custom\n")
    with pytest.raises(
        ValueError,
        match=f"^'{tmp_path}' is the folder of a run, not a preset: .* are {tmp_path}/config.yaml$",
    ):
        read_preset(str(tmp_path))


def test_a_users_own_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("base: custom\nmodel: {dim: 32}\n")
    assert read_preset(str(file))[-1] == Layer(str(file), {"model": {"dim": 32}})
    assert len(read_preset(str(file))) == 2
    (tmp_path / "more.yaml").write_text("base: mine.yaml")
    assert [layer.source for layer in read_preset(str(tmp_path / "more.yaml"))][1] == str(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  {dim: 3", "mine.yaml, line 2, column 10 is not readable YAML: expected"),
        ("model: {dim: 3, dim: 4}", "line 1, column 17 is not readable YAML: the key 'dim' stands twice"),
        ("- 1", "must hold a mapping"),
        ("base: 3", "base must be the name of a preset, not 3"),
        ("base: costum", "mine.yaml: base: there is no preset 'costum'; did you mean 'custom'"),
        ("model: !!python/object/apply:os.getcwd []", "is not readable YAML"),
    ],
)
def test_bad_files(text, message, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_preset(str(file))


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "mine.yaml").write_bytes("# für\nbase: mnist".encode("latin-1"))
    with pytest.raises(
        ValueError, match=r"cannot read the preset file .*mine.yaml: it is not UTF-8 at byte 3"
    ):
        read_preset(str(tmp_path / "mine.yaml"))


def test_mappings_can_be_merged(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: &small {dim: 3, heads: 1}\noptim: {<<: *small, dim: 4}")
    assert read_preset(str(file))[0].values["optim"] == {"dim": 4, "heads": 1}


def test_a_missing_file_and_a_circle(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the preset file .*nowhere.yaml: No such file"):
        read_preset(str(tmp_path / "nowhere.yaml"))
    (tmp_path / "a.yaml").write_text("base: a.yaml")
    with pytest.raises(ValueError, match="in a circle"):
        read_preset(str(tmp_path / "a.yaml"))


def test_names_are_sorted_and_known():
    names = preset_names()
    assert names == sorted(names)
    assert {"custom", "peptides-func", "peptides-func-paper"} <= set(names)
