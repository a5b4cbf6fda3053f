"""Cluster files: what loads, and the one sentence for what does not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncspec.core.errors import UserError
from asyncspec_nodes.cluster.config import PaceTable, even_split, layout
from asyncspec_nodes.cluster.file import examine, load, parse, to_toml

EXAMPLES = Path(__file__).parents[2] / "nodes" / "examples"

GOOD = """
[cluster]
name = "home"
[target]
path = "model"
[[node]]
rank = 0
host = "127.0.0.1"
port = 7700
[[node]]
rank = 1
host = "127.0.0.1"
port = 7701
[[node]]
rank = 2
host = "localhost"
port = 7702
"""


def spans(first: str, second: str) -> str:
    """``GOOD`` with layer ranges for its two stages."""
    one, two = f"port = 7701\nlayers = {first}", f"port = 7702\nlayers = {second}"
    return GOOD.replace("port = 7701", one).replace("port = 7702", two)


def test_a_good_file_has_defaults() -> None:
    config = parse(GOOD)
    assert config.stages == 2
    assert config.draft.source == "auto"
    assert config.target.quantize == "none"
    assert config.target.generation_config == "auto"
    assert config.draft.policy == "flow"
    assert config.at(2).port == 7702


def test_the_targets_recommendations_may_be_left_aside() -> None:
    config = parse(GOOD.replace('path = "model"', 'path = "model"\ngeneration_config = "none"'))
    assert config.target.generation_config == "none"
    assert parse(to_toml(config)) == config


def test_draft_nodes_need_no_table() -> None:
    """Stages alone are a cluster: draft nodes come as they like."""
    config = parse(GOOD.replace("rank = 0", "rank = 3"))
    assert config.stages == 3
    assert config.find(0) is None
    assert parse(to_toml(config)) == config


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[target]", "[targe]"), "unknown key: targe"),
        (('path = "model"', 'paths = "model"'), "unknown key: target.paths"),
        (('path = "model"', ""), "missing key: target.path"),
        (('path = "model"', 'path = "model"\ndtype = "int3"'), "target.dtype: invalid enum value"),
        (('path = "model"', 'path = "model"\nquantize = "int3"'), "target.quantize: invalid enum"),
        (("port = 7701", "port = 70000"), "node[1].port: "),
        (("port = 7701", "port = 7700"), "both have the address 127.0.0.1:7700"),
        (("rank = 2", "rank = 3"), "no [[node]] table has rank 2 (a verify stage)"),
        (("rank = 2", "rank = 1"), "two [[node]] tables have rank 1"),
        (('name = "home"', 'name = "home"\nstages = 3'), "stages = 3, but 2"),
        (('"localhost"', '"192.168.1.7"'), "add a [security] table"),
        (('"localhost"', '"example.net"'), "add a [security] table"),
        (('"localhost"', '"http://box"'), "not a host name"),
        (('"localhost"', '"127.0..0.1"'), "'127.0..0.1' is not a host name or an address (rank 2)"),
        (("[cluster]", "[cluster"), "not valid TOML"),
        (("port = 7700", "port = 7700\nlayers = [0, 1]"), "holds no target layers"),
        (("port = 7701", "port = 7701\nlayers = [0, 1]"), "rank 2 has no layers key"),
        (('path = "model"', 'path = "model"\n[draft]\npolicy = "best"'), "unknown policy 'best'"),
        (('path = "model"', 'path = "model"\n[draft]\nsource = "eagle:"'), "names no head"),
        (
            ('path = "model"', 'path = "model"\n[draft]\nsource = "ngram"\nlearn = true'),
            "ngram cannot learn; take an EAGLE-3 or DFlash head",
        ),
        (
            ('path = "model"', 'path = "model"\n[draft]\nsource = "twin:4"'),
            "there is no twin:4; use",
        ),
        (('path = "model"', 'path = "model"\n[limits]\nsessions = 0'), "limits.sessions: "),
        (("[target]", "[limits]\nsilence_seconds = nan\n[target]"), "limits.silence_seconds: "),
        (("[target]", "[pace.2]\nseconds = inf\n[target]"), "inf is no number"),
        (("port = 7700", "port = 1e999"), "node[0].port: "),
        (
            ("port = 7701", "port = 7701\nmemory_gib = 1e300"),
            "memory_gib: expected float <",
        ),
        (("port = 7701", "port = 7701\nlatency_ms = 1e300"), "latency_ms: expected float <"),
        (("port = 7701", "port = 7701\ngb_per_second = 1e-320"), "gb_per_second: expected float >"),
        (("[target]", '[source]\nhost = "10.0.0.9"\nport = 7703\n[target]'), "10.0.0.9 (rank 3)"),
        (
            ("[target]", '[source]\nhost = "localhost"\nport = 7702\n[target]'),
            "rank 2 and rank 3 both",
        ),
        (
            ('path = "model"', 'path = "model"\n[security]\nca = "a"'),
            "key: security.certificate",
        ),
    ],
)
def test_a_mistake_is_one_sentence(change: tuple[str, str], says: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(UserError) as error:
        parse(GOOD.replace(change[0], change[1], 1))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("[0, 3]", "[2, 8]", "starts at layer 2, but layer 3 comes next"),
        ("[0, 3]", "[4, 8]", "starts at layer 4, but layer 3 comes next"),
        ("[1, 3]", "[3, 8]", "starts at layer 1, but layer 0 comes next"),
        ("[0, 0]", "[0, 8]", "rank 1 holds no layer"),
        ("[0, 3]", "[3, 7]", "the target has 8"),
        ("[0, 3]", "[3, 9]", "the target has 8"),
    ],
)
def test_layers_that_do_not_fit(first: str, second: str, says: str) -> None:
    with pytest.raises(UserError, match="layer") as error:
        layout(parse(spans(first, second)), 8)
    assert says in str(error.value)


def test_a_source_is_a_node_behind_the_stages() -> None:
    source = '[source]\nhost = "127.0.0.1"\nport = 7703\n[target]'
    config = parse(GOOD.replace("[target]", source))
    assert config.stages == 2
    assert config.at(3).port == 7703
    assert parse(to_toml(config)) == config


def test_a_node_may_be_made_slower() -> None:
    slow = "[pace.2]\nseconds = 0.04\nrow_seconds = 0.0005\n[pace.0]\nlevel_seconds = 0.005\n"
    config = parse(GOOD + slow)
    assert config.pace == {
        2: PaceTable(seconds=0.04, row_seconds=0.0005),
        0: PaceTable(level_seconds=0.005),
    }
    assert parse(to_toml(config)) == config
    with pytest.raises(UserError, match="there is no node with rank 7"):
        parse(GOOD + slow.replace("pace.2", "pace.7"))


@pytest.mark.parametrize(
    ("pace", "says"),
    [
        ("[pace.0]\nrow_seconds = 1\n", "[pace.0]: row_seconds is a verify stage's"),
        ("[pace.1003]\nseconds = 1\n", "[pace.1003]: seconds is a verify stage's"),
        ("[pace.2]\nseconds = 1\ncall_seconds = 1\n", "[pace.2]: call_seconds is of what drafts"),
    ],
)
def test_a_pace_is_that_of_its_nodes_work(pace: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(GOOD + pace)
    assert says in str(caught.value)


def test_layers_may_be_given_or_split_evenly() -> None:
    assert layout(parse(spans("[0, 3]", "[3, 8]")), 8) == ((0, 3), (3, 8))
    assert layout(parse(GOOD), 7) == ((0, 4), (4, 7))
    with pytest.raises(UserError, match="2 stages are more than the target's 1 layers"):
        layout(parse(GOOD), 1)


@given(st.integers(1, 200), st.integers(1, 64))
def test_an_even_split_covers_every_layer_once(layers: int, stages: int) -> None:
    if stages > layers:
        return
    ranges = even_split(layers, stages)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(layers))
    sizes = [b - a for a, b in ranges]
    assert len(sizes) == stages
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda p: p.name)
def test_the_examples_load(path: Path) -> None:
    assert load(path).stages >= 2


@pytest.mark.parametrize("listen", ["", 'listen = "127.0.0.1:7700"'])
def test_machines_behind_tunnels_may_have_the_same_ports(listen: str) -> None:
    text = GOOD.replace("port = 7700", "port = 7700\nhttp = 8000")
    text = text.replace("port = 7701", f"port = 7701\nhttp = 8000\n{listen}")
    assert parse(text).at(1).http == 8000


def test_machines_may_have_the_same_private_addresses_and_ports() -> None:
    text = GOOD.replace('name = "home"', 'name = "home"\ninsecure = true')
    for port in (7700, 7702):
        text = text.replace(f"port = {port}", f'port = {port}\nlisten = "10.0.0.1:7"\nhttp = 8000')
    assert parse(text).at(2).http == 8000


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    security = '[security]\nca = "ca.pem"\ncertificate = "node.pem"\nkey = "/keys/node.key"\n'
    (tmp_path / "c.toml").write_text(GOOD + security)
    config = load(tmp_path / "c.toml")
    assert config.target.path == str(tmp_path / "model")
    assert config.draft.source == "auto"
    assert config.security is not None
    assert config.security.ca == str(tmp_path / "ca.pem")
    assert config.security.key == "/keys/node.key"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("eagle:head", "eagle:{}/head"),
        ("eagle:./gone", "eagle:{}/gone"),
        ("eagle:a/b", "eagle:a/b"),
        ("twin", "twin"),
        ("twin:int8+ngram", "twin:int8+ngram"),
        ("suffix+ngram", "suffix+ngram"),
        ("./twin", "{}/twin"),
    ],
)
def test_a_sources_path_is_relative_too(tmp_path: Path, source: str, found: str) -> None:
    (tmp_path / "head").mkdir()
    (tmp_path / "twin").mkdir()
    (tmp_path / "c.toml").write_text(f'{GOOD}[draft]\nsource = "{source}"\n')
    assert load(tmp_path / "c.toml").draft.source == found.format(tmp_path)


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("model.gguf", "{}/model.gguf"),
        ("llama:model.bin", "llama:{}/model.bin"),
        ("org/model-GGUF:Q8_0", "org/model-GGUF:Q8_0"),
    ],
)
def test_a_gguf_files_path_is_relative_too(tmp_path: Path, path: str, found: str) -> None:
    for name in ("model.gguf", "model.bin"):
        (tmp_path / name).touch()
    (tmp_path / "c.toml").write_text(GOOD.replace('"model"', f'"{path}"'))
    assert load(tmp_path / "c.toml").target.path == found.format(tmp_path)
    # The key says what a name does not.
    file = GOOD.replace('"model"', '"model.bin"\nbackend = "llama"')
    (tmp_path / "c.toml").write_text(file + '[llama]\nkv_type = "q8_0"\n')
    assert load(tmp_path / "c.toml").target.path == f"llama:{tmp_path}/model.bin"


@pytest.mark.parametrize(
    ("target", "table", "says"),
    [
        ("model", 'device = "cpu"', r"\[llama\] is for GGUF targets, and model is none"),
        ("m.gguf", 'kv_type = "q8_0"\nflash_attention = "off"', "q8_0 needs flash attention"),
        ('m.gguf"\nkv_type = "q8_0', 'flash_attention = "off"', "q8_0 needs flash attention"),
        ('model"\nkv_type = "f16', "", "kv_type f16 is for GGUF targets, and model is none"),
        ("m.gguf", "gpu_layers = -2", "gpu_layers"),
        ('m.gguf"\nbackend = "hf', "", "m.gguf is not a model of the backend hf"),
    ],
)
def test_options_of_llama_cpp_that_cannot_be(target: str, table: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        parse(f"{GOOD.replace('model', target)}[llama]\n{table}\n")


def test_a_node_has_a_file_and_a_device_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    own = 'target = "m.gguf"\ndevice = "cuda"\n'
    (tmp_path / "c.toml").write_text(GOOD.replace("rank = 2\n", f"rank = 2\n{own}"))
    config = load(tmp_path / "c.toml")
    assert config.mixed
    assert config.target_of(2) == f"{tmp_path}/m.gguf"
    assert config.target_of(0) == config.target_of(1) == config.target.path
    assert [config.engine_of(rank).device for rank in (1, 2)] == ["auto", "cuda"]
    assert parse(to_toml(config)) == config
    assert not parse(GOOD).mixed


def test_a_device_comes_from_the_node_then_the_file() -> None:
    """A node's own, else [llama]'s, which only GGUF targets have, else [target]'s."""
    everywhere = GOOD.replace('"model"', '"model"\ndevice = "cuda"')
    config = parse(everywhere.replace("rank = 2\n", 'rank = 2\ndevice = "cpu"\n'))
    assert [config.engine_of(rank).device for rank in (0, 1, 2, 1000)] == [
        *("cuda", "cuda", "cpu", "cuda")
    ]
    assert config.stage_options.engine.device == "cuda"
    assert parse(to_toml(config)) == config
    gguf = parse(everywhere.replace("model", "m.gguf") + '[llama]\ndevice = "vulkan"\n')
    assert gguf.engine_of(1).device == "vulkan"


def test_a_type_of_caches_comes_from_llamas_table_then_the_targets() -> None:
    rounded = GOOD.replace('"model"', '"model"\nkv_type = "q8_0"')
    assert parse(rounded).stage_options.engine.kv_type == "q8_0"
    table = '[llama]\nkv_type = "f16"\n'
    gguf = parse(rounded.replace('"model"', '"m.gguf"') + table)
    assert gguf.engine_of(1).kv_type == "f16"


def test_the_draft_node_has_no_file_of_its_own() -> None:
    with pytest.raises(UserError, match="target is for verify stages"):
        parse(GOOD.replace("rank = 0\n", 'rank = 0\ntarget = "m.gguf"\n'))


ABOUT_PATHS = [
    ('path = "~no-such-user/x"', "'~no-such-user/x' cannot be a path: "),
    ('path = "a\\u0000b"', r"'a\x00b' cannot be a path: "),
    (f'path = "{"x" * 5000}"', f"'{'x' * 80}...' cannot be a path: "),
    ('path = "model"\nchat_template = "~no-such-user/x"', "cannot be a path: "),
    ('path = "model"\nchat_template = "a\\u0000b"', "cannot be a path: "),
    ('path = "model"\n[draft]\nsource = "eagle:~no-such-user/x"', "cannot be a path: "),
    (
        'path = "model"\n[security]\nca = "a\\u0000b"\ncertificate = "c"\nkey = "k"',
        "cannot be a path: ",
    ),
    ("path = " + "[" * 3000 + "]" * 3000, "it is nested too deeply"),
]


@pytest.mark.parametrize(("lines", "says"), ABOUT_PATHS, ids=range(len(ABOUT_PATHS)))
def test_what_cannot_be_a_path(tmp_path: Path, lines: str, says: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GOOD.replace('path = "model"', lines))
    with pytest.raises(UserError) as error:
        load(file)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    found, faults = examine(file)
    assert found is None
    assert [fault for fault in faults if says in fault]


def test_a_folder_of_the_working_directory_does_not_hinder_an_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may have meant it: ``asyncspec join`` writes files into folders of its own."""
    (tmp_path / "here" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "c.toml").write_text(GOOD + '[draft]\nsource = "model+ngram"\n')
    config = load(tmp_path / "c.toml")
    assert (config.target.path, config.draft.source) == ("model", "model+ngram")


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "c.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"cannot read the cluster file .*c\.toml"):
        load(path)


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20))
def test_what_is_written_loads_again(path: str) -> None:
    config = parse(spans("[0, 3]", "[3, 8]"))
    config = msgspec.structs.replace(
        config, target=msgspec.structs.replace(config.target, path=path)
    )
    assert parse(to_toml(config)) == config


def test_those_that_are_processed_do_not_wait() -> None:
    limits = parse(GOOD.replace("[target]", "[limits]\nsessions = 4\nwaiting = 1\n[target]")).limits
    assert limits.requests == 5
