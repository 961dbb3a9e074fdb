"""hydra/plan and `hydra plan`: headers, shapes, splits, changes that help, speed, and what the command says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hydra import cli, config
from hydra.bench import synthetic
from hydra.commands import plan as command
from hydra.doctor import fit
from hydra.errors import ModelError
from hydra.plan import cards, graph, report, speed, split
from hydra.plan.gguf import BY_NAME, read_header, row_bytes
from hydra.plan.memory import GIB, Place, Setting, all_nodes, cache_bytes, node_bytes, ranges, state_bytes, step_of
from hydra.plan.shape import Layer, Shape, shape_of
from tests.doctor_support import listener


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def shape(name: str, folder) -> Shape:
    return shape_of(read_header(synthetic.model(name, directory=folder)))


def dense(n_layer: int = 64, *, weights: int = 300 << 20, name: str = "big", nextn: int = 0) -> Shape:
    """A made-up dense model: equal layers, 24 heads over one KV head of 256."""
    layers = tuple(Layer(il, True, 0, False, 24, 1, 17408, weights, weights, mtp=il >= n_layer)
                   for il in range(n_layer + nextn))
    return Shape(name, "llama", n_layer, nextn, 5120, 150_000, 262_144, 256, 256, 256, 256, layers, 800 << 20,
                 800 << 20, False, n_layer * weights)


RIG = (Place("mini", False, True, 12 * GIB, 300e9), Place("tower", True, True, 16 * GIB, 370e9))
REFERENCE = Setting(65536, 2048, 512, "q8_0", "q8_0")


# ---- headers --------------------------------------------------------------------------------------------------------


def test_header_is_what_gguf_reads(folder):
    import gguf

    path = synthetic.model("toy", directory=folder)
    header = read_header(path)
    theirs = gguf.GGUFReader(path)
    assert {t.name: (list(t.shape), t.n_bytes, t.data_offset) for t in theirs.tensors} == {
        t.name: (list(t.shape), t.n_bytes, t.offset) for t in header.tensors.values()}
    assert header.meta["qwen35.block_count"] == 5 and header.meta["tokenizer.ggml.tokens"] == 512


def test_type_sizes_are_ggmls():
    from hydra.ggml.library import load

    ggml = load()
    for name, number in BY_NAME.items():
        per_block, size = int(ggml.ggml_blck_size(number)), int(ggml.ggml_type_size(number))
        assert row_bytes(name, per_block) == size and row_bytes(name, 4 * per_block) == 4 * size, name
        assert ggml.ggml_type_name(number).decode().lower() == name.lower()


@pytest.mark.parametrize(("spoil", "words"), [
    (lambda data: b"GGML" + data[4:], "not GGUF"), (lambda data: data[:200], "not a usable"),
    (lambda data: data[:4] + b"\x09" + data[5:], "version is 9"), (lambda data: data[:-4096], "not complete"),
    (lambda data: data[:8] + b"\xff" * 8 + data[16:], "it claims"), (lambda data: b"", "cannot be read|not a usable"),
])
def test_damaged_files(tmp_path, folder, spoil, words):
    data = synthetic.model("toy-llama", directory=folder).read_bytes()
    (tmp_path / "x.gguf").write_bytes(spoil(data))
    with pytest.raises(ModelError, match=words):
        read_header(tmp_path / "x.gguf")


def test_missing_file_and_no_model(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_header(tmp_path / "none.gguf")


# ---- shapes ---------------------------------------------------------------------------------------------------------


def test_shapes(folder):
    toy = shape("toy", folder)
    assert [layer.recurrent for layer in toy.layers] == [True, False, True, False, False]
    assert [layer.attends for layer in toy.layers] == [False, True, False, True, True]
    assert (toy.n_layer, toy.n_nextn, toy.layers[4].mtp, toy.gated, toy.mtp_embeds) == (4, 1, True, True, True)
    gemma = shape("toy-gemma", folder)
    assert [layer.window for layer in gemma.layers] == [64, 64, 64, 64, 64, 0]


def test_every_byte_of_the_file_has_its_place(folder):
    for name in ("toy", "toy-llama", "toy-gemma"):
        found = shape(name, folder)
        counted = sum(layer.weights for layer in found.layers) + found.embed_bytes + found.output_bytes
        header = read_header(synthetic.model(name, directory=folder))
        assert counted == sum(t.n_bytes for t in header.tensors.values())


def test_cache_and_state_formulas(folder):
    toy = shape("toy", folder)
    setting = Setting(ctx_size=1000)  # padded to 1,024
    step = step_of(toy, setting)
    assert (step.cells, step.n_rs, step.outputs) == (1024, 3, 4)
    assert cache_bytes(toy, toy.layers[1:2], setting, step) == 1024 * 2 * (64 * 2) * 2
    # 3 convolution columns of 256 + 2·2·32 channels and a state of 32·256, f32, newest and 3 snapshots
    assert state_bytes(toy, toy.layers[:1], setting, step) == 4 * (3 * 384 + 32 * 256) * 4
    assert step_of(toy, replace(setting, draft=False)).n_rs == 0


def test_ranges():
    assert ranges({"a": 3, "b": 0, "c": 5}) == {"a": (0, 3), "b": (3, 3), "c": (3, 8)}


# ---- the allocator --------------------------------------------------------------------------------------------------


def test_arena_takes_the_best_hole_and_shrinks_again():
    arena = graph.Arena()
    a, b, c, d = (arena.take(size) for size in (1024, 256, 512, 256))
    arena.give(a, 1024)
    arena.give(c, 512)
    assert arena.take(512) == c, "the hole that fits best, not the first"
    arena.give(d, 256)
    assert arena.take(2048) == d, "the end moves back, and grows again"
    arena.give(b, 256)
    assert arena.take(1280) == a, "neighbouring holes are one"


def test_peak_of_a_chain_is_two_tensors():
    g = graph.Graph()
    x = g.op(1024)
    for _ in range(10):
        x = g.op(1024, x)
    g.store(x)
    assert g.peak() == 2048


def test_in_place_needs_no_second_tensor():
    g = graph.Graph()
    x = g.op(1024)
    for _ in range(10):
        x = g.op(1024, x, inplace=True)
    g.store(x)
    assert g.peak() == 1024


# ---- split ----------------------------------------------------------------------------------------------------------


def test_the_faster_node_is_filled_first():
    counts = split.best_split(dense(40, weights=250 << 20), Setting(8192), RIG)
    assert counts["mini"] == 0, "all of it fits on the faster card"
    counts = split.best_split(dense(64), REFERENCE, RIG)
    assert sum(counts.values()) == 64 and counts["mini"] > 0
    assert split.fits(dense(64), REFERENCE, RIG, counts)
    one_more = {"mini": counts["mini"] - 1, "tower": counts["tower"] + 1}
    assert not split.fits(dense(64), REFERENCE, RIG, one_more), "the faster card is full"


def test_equal_or_unknown_speed_shares_by_memory():
    places = [replace(place, bandwidth_bytes_s=0.0) for place in RIG]
    counts = split.best_split(dense(64, weights=200 << 20), Setting(8192), places)
    assert counts["tower"] > counts["mini"] > 15
    one = [replace(places[0], memory_bytes=0), places[1]]
    assert split.best_split(dense(64, weights=150 << 20), Setting(8192), one) == {"mini": 32, "tower": 32}
    unknown = [replace(place, memory_bytes=0) for place in places]
    assert split.best_split(dense(64), Setting(8192), unknown) == {"mini": 32, "tower": 32}


def test_three_nodes_and_one():
    places = (Place("a", False, True, 8 * GIB, 300e9), Place("b", False, True, 8 * GIB, 200e9), RIG[1])
    counts = split.best_split(dense(64), REFERENCE, places)
    assert sum(counts.values()) == 64 and list(counts) == ["a", "b", "tower"]
    assert split.fits(dense(64), REFERENCE, places, counts)
    assert split.best_split(dense(8), Setting(), RIG[1:]) == {"tower": 8}
    with pytest.raises(ModelError, match="no head"):
        split.best_split(dense(8), Setting(), RIG[:1])


def test_a_given_split_that_is_too_much_for_the_small_card_is_mended():
    counts = {"mini": 45, "tower": 19}
    plan = report.make(dense(64), REFERENCE, RIG, counts)
    assert list(plan.lacking) == ["mini"] and not plan.fits and "mini" in plan.limit
    first = plan.changes[0]
    assert first.words.startswith("layers: ") and split.fits(dense(64), first.setting, RIG, first.counts)


@pytest.mark.parametrize(("mib", "setting", "words"), [
    (360, Setting(65536), "ctx_size = 5"), (370, Setting(65536), "cache_type_k = cache_type_v = \"q8_0\" and layers: "),
    (390, REFERENCE, "cache_type_k = cache_type_v = \"q4_0\""),
    (390, Setting(131072, type_k="q4_0", type_v="q4_0"), "ctx_size = "),
])
def test_the_smallest_change_is_named_and_really_fits(mib, setting, words):
    model = dense(64, weights=mib << 20)
    plan = report.make(model, setting, RIG, None)
    assert not plan.fits, plan.lacking
    assert plan.changes and plan.changes[0].words.startswith(words), [c.words for c in plan.changes]
    for change in plan.changes:
        assert split.fits(model, change.setting, RIG, change.counts), change.words


def test_nothing_helps_a_model_that_is_far_too_big():
    plan = report.make(dense(64, weights=2 << 30), REFERENCE, RIG, None)
    assert not plan.fits and plan.changes == ()
    assert "No single change" in " ".join(command.verdict_lines(plan))


def test_largest_context_is_the_largest():
    model, counts = dense(64), {"mini": 24, "tower": 40}
    setting = replace(REFERENCE, ctx_size=8192)
    largest = split.largest_context(model, setting, RIG, counts)
    assert split.fits(model, replace(setting, ctx_size=largest), RIG, counts)
    assert not split.fits(model, replace(setting, ctx_size=largest + split.CONTEXT_STEP), RIG, counts)
    assert split.largest_context(model, setting, RIG, None) >= largest


def test_draft_context_is_counted():
    """Forgetting it is what made others die after loading."""
    with_block, setting = dense(16, nextn=1), Setting(65536)
    head = Place("tower", True, True)
    drafting, plain = (node_bytes(with_block, s, head, (0, 16)) for s in (setting, replace(setting, draft=False)))
    assert drafting.draft > 65536 * 2 * 256 * 2, "its cache and its compute buffer"
    assert drafting.weights - plain.weights == with_block.layers[-1].weights


def test_a_card_needs_more_than_llama_cpp_says():
    gpu, cpu = (node_bytes(dense(8), REFERENCE, Place("p", False, is_gpu), (0, 8)) for is_gpu in (True, False))
    assert gpu.reserve > cpu.reserve
    assert gpu.compute > cpu.compute, "flash attention makes f16 of a quantised cache there"
    head = node_bytes(dense(8), REFERENCE, Place("h", True, True), (0, 8))
    assert head.host > dense(8).embed_bytes, "token embeddings stay in the head's own memory"


# ---- speed ----------------------------------------------------------------------------------------------------------


def test_step_time_is_bytes_over_bandwidth():
    model, counts = dense(64), {"mini": 24, "tower": 40}
    found = speed.predict(model, REFERENCE, RIG, counts, depth=0, link_s=0.002, wire_bytes_s=1e15)
    assert found is not None
    mini = found.nodes["mini"]
    assert mini.read_bytes == 24 * (300 << 20) and mini.memory_s == pytest.approx(mini.read_bytes / 300e9)
    assert mini.wire_s == pytest.approx(speed.PEER_S + 0.002, rel=1e-3) and found.nodes["tower"].wire_s == 0
    assert found.step_s == pytest.approx(sum(node.total_s for node in found.nodes.values()))
    deep = speed.predict(model, REFERENCE, RIG, counts, depth=65536)
    assert deep is not None and deep.tokens_per_s < found.tokens_per_s, "a full cache has to be read as well"


def test_mtp_gains_by_acceptance():
    model = dense(64, nextn=1)
    counts = {"mini": 24, "tower": 40}
    none, some, all_ = (speed.predict(model, REFERENCE, RIG, counts, acceptance=p) for p in (0.0, 0.7, 1.0))
    assert none and some and all_
    assert none.mtp_tokens_per_step == 1 and all_.mtp_tokens_per_step == 4
    assert none.mtp_tokens_per_s < none.tokens_per_s < some.mtp_tokens_per_s < all_.mtp_tokens_per_s


def test_speed_is_not_guessed():
    assert speed.predict(dense(), REFERENCE, [replace(RIG[0], bandwidth_bytes_s=0.0), RIG[1]],
                         {"mini": 24, "tower": 40}) is None


def test_reference_rig_is_near_what_was_measured_there():
    """29.2 tok/s were measured at 2K with MTP (draft of 3) on a 27B Q5_K_M, 25 layers on the RTX 3060."""
    per_layer = int(262e6)
    layers = tuple(Layer(il, (il + 1) % 4 == 0 or il == 64, 0, il < 64 and (il + 1) % 4 != 0, 24, 4, 17408, per_layer,
                         per_layer, mtp=il == 64) for il in range(65))
    model = Shape("27b", "qwen35", 64, 1, 5120, 248_320, 262_144, 256, 256, 256, 256, layers, 1350 << 20, 1000 << 20,
                  False, 19_000_000_000, 30_720, 786_432,
                  {"conv": 4, "inner": 6144, "state": 128, "heads": 48, "groups": 16}, gated=True)
    places = (Place("mini", False, True, 12 * GIB, 360e9 * cards.EFFICIENCY),
              Place("tower", True, True, 16 * GIB, 448e9 * cards.EFFICIENCY))
    plan = report.make(model, REFERENCE, places, {"mini": 25, "tower": 39})
    assert plan.fits and plan.near is not None and plan.far is not None
    assert plan.near.mtp_tokens_per_s == pytest.approx(29.2, rel=0.15)


@pytest.mark.parametrize(("name", "found"), [
    ("NVIDIA GeForce RTX 5060 Ti", (16, 448)), ("RTX 3060", (12, 360)), ("rtx3060ti", (8, 448)),
    ("NVIDIA H200", (141, 4800)), ("NVIDIA GeForce RTX 3060 Laptop GPU", (12, 360)), ("AMD EPYC", None), ("", None),
    ("NVIDIA RTX 4000 Ada Generation", (20, 360)),
])
def test_cards(name, found):
    assert cards.find(name) == found


# ---- the command ----------------------------------------------------------------------------------------------------

TOML = """\
[model]
path = "{model}"
ctx_size = {ctx}
[[nodes]]
name = "tower"
role = "head"
host = "192.0.2.10"
gpu = "RTX 5060 Ti"
memory_gib = {memory}
layers = {layers}
[[nodes]]
name = "mini"
role = "peer"
host = "127.0.0.1"
port = {port}
device = "CPU"
memory_gib = {memory}
bandwidth_gbs = 20.0
layers = {peer_layers}
"""


def toml(tmp_path, folder, **changes: object) -> str:
    values: dict[str, object] = {"model": synthetic.model("toy", directory=folder), "ctx": 4096, "memory": 4.0,
                                 "port": 1, "layers": '"auto"', "peer_layers": 2, **changes}
    file = tmp_path / "hydra.toml"
    file.write_text(TOML.format(**values))
    return str(file)


def run(capsys, *arguments: str) -> tuple[int, str]:
    code = cli.run(["plan", *arguments])
    return code, capsys.readouterr().out


def test_command(capsys, tmp_path, folder):
    code, out = run(capsys, "--config", toml(tmp_path, folder), "--offline")
    assert code == 0 and "tower (head)" in out and "largest context that fits" in out
    assert "with MTP" in out and "decode at 2048 tokens" in out
    code, out = run(capsys, "--config", toml(tmp_path, folder), "--offline", "--json")
    found = json.loads(out.splitlines()[-1])
    assert code == 0 and found["split"] == {"mini": 2, "tower": 2} and found["fits"] and not found["split_chosen"]
    assert {node["name"]: node["layers"] for node in found["nodes"]} == found["split"]
    assert found["speed"][0]["tokens_per_s"] > 0


def test_command_that_does_not_fit(capsys, tmp_path, folder):
    file = toml(tmp_path, folder, ctx=262144, memory=0.9)
    code, out = run(capsys, "--config", file, "--offline")
    assert code == 1 and "does not fit" in out and "too little" in out
    code, out = run(capsys, "--config", file, "--offline", "--ctx-size", "4096")
    assert code == 0, out


def test_all_auto_is_split_here(capsys, tmp_path, folder):
    code, out = run(capsys, "--config", toml(tmp_path, folder, peer_layers='"auto"'), "--offline", "--json")
    found = json.loads(out)
    assert code == 0 and found["split_chosen"] and sum(found["split"].values()) == 4


def test_a_running_peer_is_asked(tmp_path, folder):
    with listener() as running:
        file = toml(tmp_path, folder, port=running.port, memory=0.0)
        cfg = config.load(file)
        asked = fit.place_of(cfg.node("mini"), "", offline=False)
        silent = fit.place_of(cfg.node("mini"), "", offline=True)
    assert asked.memory_bytes > GIB // 4 and not asked.gpu and asked.bandwidth_bytes_s == 20e9
    assert silent.memory_bytes == 0


def test_refusal_names_the_node_and_a_way_out(tmp_path, folder):
    cfg = config.load(toml(tmp_path, folder, ctx=262144, memory=0.9))
    plan = fit.plan_for(cfg, "", offline=True)
    error = command.refusal(plan)
    assert "too little" in error.message and "--force" in error.hint and "Try " in error.hint


def test_nodes_without_known_memory_are_not_refused(tmp_path, folder):
    plan = report.make(shape("toy", folder), Setting(), [Place("tower", True, False)], None)
    assert plan.fits and plan.context_here == -1 and "nothing that is known" in plan.limit
    assert all_nodes(shape("toy", folder), Setting(), plan.places, plan.counts)["tower"].total > 0


# ---- hydra up -------------------------------------------------------------------------------------------------------


def test_up_refuses_what_cannot_fit(capsys, tmp_path, folder):
    file = toml(tmp_path, folder, ctx=262144, memory=0.9)
    code = cli.run(["up", "--config", file, "--node", "tower"])
    err = capsys.readouterr().err
    assert code == ModelError.exit_code and "too little" in err and "WEIGHTS" in err and "--force" in err


def test_up_leaves_the_layers_to_the_engine_where_a_peer_says_nothing(tmp_path, folder, monkeypatch):
    from hydra.commands import up

    monkeypatch.setattr(up, "PEERS_S", 0.1)
    cfg = config.load(toml(tmp_path, folder, peer_layers='"auto"'), overrides={"nodes.mini.memory_gib": 0.0})
    assert up._plan(cfg, "tower", force=False) == {}


def test_up_with_force_and_with_auto(tmp_path, folder):
    from hydra.commands import up

    cfg = config.load(toml(tmp_path, folder, ctx=262144, memory=0.9))
    assert up._plan(cfg, "tower", force=True) == {}
    cfg = config.load(toml(tmp_path, folder, peer_layers='"auto"'))
    decided = up._plan(cfg, "tower", force=False)
    assert sum(decided.values()) == 4 and set(decided) == {"nodes.mini.layers", "nodes.tower.layers"}
    again = config.load(toml(tmp_path, folder, peer_layers='"auto"'), overrides=decided)
    assert [node.layers for node in again.nodes] == [decided[f"nodes.{node.name}.layers"] for node in again.nodes]
