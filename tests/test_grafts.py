"""Every graft on every architecture: nothing changes at the start, lanes stay apart, files are judged by their form."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from bitfit import Delta, Predictor, load_base, predict, train
from bitfit.bank.bank import Bank
from bitfit.bank.lanes import lane_of_delta, lane_to_train
from bitfit.delta.fold import fold, serving_form
from bitfit.errors import DeltaError, Interrupted, SelectionError, UsageError
from bitfit.model.architectures import architecture
from bitfit.model.audit import count
from bitfit.model.grafts import GRAFTS
from bitfit.model.language import select
from bitfit.model.task_model import Model
from bitfit.prediction.export import export
from bitfit.prediction.host import Host
from bitfit.tasks.encode import Encoder
from packing import PACKED, STREAMS, assert_close, learn, rows, tiny_base
from support import ARCHITECTURES, INJECT, StopAt, reviews

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
TEXTS = [text for text, _ in reviews(8)]
# Every registered graft joins with its example; these texts cover more of what a graft can do.
SHARPER = {"lora": "lora(W_q + W_v + W_m2, 3, 4)", "adapter": "adapter(5)"}
GRAFTED = {word: SHARPER.get(word, GRAFTS[word].example) for word in GRAFTS if word != "bias"}
CASES = [(name, text) for name in ARCHITECTURES for text in GRAFTED.values()]
CASES += [(name, GRAFTS["bias"].example) for name in INJECT]  # biases, where layers lack them
every_case = pytest.mark.parametrize(("architecture_name", "inject"), CASES)
SOME_CASES = [case for case in CASES if case[0] in ("bert", "gpt2", "llama")]


def bank_of(base, inject, text="injected", noise=0.2, pool="cls", lanes=1):
    """A bank whose lanes have moved away from their start."""
    model = Model(base, 3, pool, inject)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, text), seed=k) for k in range(lanes)])
    moved = torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(1))
    for k, lane in enumerate(bank.lanes):
        bank.values[k, : lane.trained] += noise * moved[k, : lane.trained]
    return bank


def gradients_of(bank, logits, k=0):
    bank.gradients.zero_()
    logits.square().sum().backward()
    slots = [slot for slot in bank.lanes[k].slots if slot.offset < bank.lanes[k].trained]
    return {slot.name: bank.gradients[k, slot.offset : slot.offset + slot.size].view(slot.shape) for slot in slots}


class Patched(torch.nn.Module):
    """A module with the formulas of LoRA and adapters, written out for this test."""

    def __init__(self, module, tensors, activation):
        super().__init__()
        self.module, self.activation = module, activation
        self.weight, self.bias = module.weight, getattr(module, "bias", None)
        self.tensors = torch.nn.ParameterDict({key.replace(".", "/"): value for key, value in tensors.items()})

    def forward(self, x):
        y = self.module(x)
        for part, place in (("", slice(None)), ("_q", 0), ("_k", 1), ("_v", 2)):
            if f"lora_A{part}" in self.tensors:
                a, b, scale = (self.tensors[f"lora_{role}{part}"] for role in ("A", "B", "scale"))
                change = scale * F.linear(F.linear(x, a), b)
                if part:
                    parts = list(y.chunk(3, -1))
                    parts[place] = parts[place] + change
                    y = torch.cat(parts, -1)
                else:
                    y = y + change
        if "adapter_up/weight" in self.tensors:
            down, up = ([self.tensors[f"adapter_{d}/{form}"] for form in ("weight", "bias")] for d in ("down", "up"))
            y = y + F.linear(self.activation(F.linear(y, *down)), *up)
        return y if "bias" not in self.tensors else y + self.tensors["bias"]


def written_out(base, bank, batch):
    """Logits and gradients of a model whose modules are replaced by the formulas."""
    model = bank.model
    whole = copy.deepcopy(model.head_model)
    values = {name: torch.from_numpy(value.copy()) for name, value in bank.tensors(0).items()}
    for name, value in values.items():
        if name.startswith("head."):
            owner, _, leaf = name.removeprefix("head.").rpartition(".")
            whole.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(value)
    encoder = whole.base_model
    found = {}
    for path, module in list(encoder.named_modules()):
        stems = [name for name in values if name.startswith(f"{path}.") and name not in base.parameters]
        own = {name.removeprefix(f"{path}."): values[name] for name in stems}
        own = {leaf: value for leaf, value in own.items() if leaf.startswith(("lora_", "adapter_")) or leaf == "bias"}
        if own and not any(True for _ in module.children()):
            activation = ACT2FN[getattr(base.config, architecture(base.config.model_type).activation)]
            patched = Patched(module, own, activation)
            owner, _, leaf = path.rpartition(".")
            encoder.get_submodule(owner)._modules[leaf] = patched
            found |= {f"{path}.{leaf}": patched.tensors[leaf.replace(".", "/")] for leaf in own}
    logits = whole.eval()(**model._batch(batch)).logits
    logits.square().sum().backward()
    return logits.detach(), {name: value.grad for name, value in found.items()}


@every_case
def test_at_the_start_the_outputs_are_those_of_the_base(bases, architecture_name, inject):
    base = bases(architecture_name)
    grafted, plain = bank_of(base, inject, noise=0.0), bank_of(base, "none", "none", noise=0.0)
    batch = {0: Encoder(base)(TEXTS)}
    assert grafted.model.injected
    assert torch.equal(grafted.logits(batch)[0], plain.logits(batch)[0])


@every_case
def test_outputs_and_gradients_are_those_of_the_formula(bases, architecture_name, inject):
    base = bases(architecture_name)
    bank, batch = bank_of(base, inject), Encoder(base)(TEXTS)
    expected, slopes = written_out(base, bank, batch)
    logits = bank.logits({0: batch})[0]
    torch.testing.assert_close(logits.detach(), expected, rtol=1e-5, atol=1e-5)
    largest = max(float(slope.abs().max()) for slope in slopes.values() if slope is not None)
    assert largest > 1e-3
    checked = 0
    for name, gradient in gradients_of(bank, logits).items():
        if name in slopes:
            checked += 1
            assert float((gradient - slopes[name]).abs().max()) <= 1e-5 * max(largest, 1.0), name
    assert checked == len(bank.model.injected)


@every_case
def test_a_lane_among_others_equals_its_separate_run(bases, architecture_name, inject):
    base = bases(architecture_name)
    together, batch = bank_of(base, inject, lanes=3), {k: Encoder(base)(TEXTS[k : 2 * k + 3]) for k in range(3)}
    logits = together.logits(batch)
    torch.stack([value.square().sum() for value in logits.values()]).sum().backward()
    for k in range(3):
        model = Model(base, 3, "cls", inject)
        alone = Bank(model, [lane_to_train(model, select(model.anatomy, "injected"), seed=k)])
        alone.values[0] = together.values[k]
        own = alone.logits({0: batch[k]})[0]
        own.square().sum().backward()
        torch.testing.assert_close(own, logits[k], rtol=1e-5, atol=1e-5)
        scale = max(1.0, float(alone.gradients.abs().max()))
        assert float((alone.gradients[0] - together.gradients[k]).abs().max()) <= 1e-5 * scale


@every_case
@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_a_poisoned_lane_leaves_the_others_bit_for_bit(bases, architecture_name, inject, poison):
    base = bases(architecture_name)
    batch = {k: Encoder(base)(TEXTS[k : k + 3 + k]) for k in range(3)}
    results = []
    for poisoned in (False, True):
        bank = bank_of(base, inject, lanes=3)
        if poisoned:
            bank.values[1] = poison
        logits = bank.logits(batch, {0: 1, 1: 2, 2: 3})
        torch.stack([value.sum() for value in logits.values()]).sum().backward()
        results.append((logits, bank.gradients))
    for k in (0, 2):
        assert torch.equal(results[0][0][k], results[1][0][k])
        assert torch.equal(results[0][1][k], results[1][1][k])


@pytest.mark.parametrize("streams", [None, STREAMS], ids=["still", "dropout"])
@pytest.mark.parametrize("pool", ["cls", "mean", "tokens"])
@pytest.mark.parametrize("text", ["lora(W_q + W_m1 + W_m3, 2)", "adapter(4)", "adapter(3) + lora(W_m1 + W_k, 2)"])
@pytest.mark.parametrize("name", PACKED)
def test_the_packed_path_equals_the_stock_model(name, text, pool, streams):
    base = tiny_base(name)
    lanes = {0: "injected", 1: "injected + layernorm + b_q", 2: "injected@1-2 + random(W_m2, 5)"}
    model = Model(base, 3, pool, text)
    bank = Bank(model, [lane_to_train(model, select(model.anatomy, s, k), seed=k) for k, s in lanes.items()])
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(3)), alpha=0.1)
    assert bank._packed is not None
    batch = {k: rows(k) for k in range(3)}
    packed, stock = bank.logits(batch, streams), bank.stock_logits(batch, streams)
    for k in batch:
        assert_close(packed[k], stock[k])
    mine, theirs = learn(bank, packed), learn(bank, stock)
    for k in batch:
        largest = float(theirs[k].abs().max())
        assert float((mine[k] - theirs[k]).abs().max()) <= 2e-5 * largest


def test_lanes_of_one_bank_may_differ_in_method():
    base = tiny_base("bert")
    texts = ["none", "lora(W_q, 2)", "lora(W_q, 4)", "adapter(3)"]
    models = [Model(base, 3, "mean", text) for text in texts]
    chosen = ["bias", "injected", "injected + b_q", "injected + layernorm"]
    lanes = [
        lane_to_train(model, select(model.anatomy, text), seed=k)
        for k, (model, text) in enumerate(zip(models, chosen, strict=True))
    ]
    bank = Bank(models, lanes)
    bank.values.add_(torch.randn(bank.values.shape, generator=torch.Generator().manual_seed(3)), alpha=0.1)
    assert bank._packed is not None
    batch = {k: rows(k % 3) for k in range(4)}
    packed, stock = bank.logits(batch), bank.stock_logits(batch)
    mine, theirs = learn(bank, packed), learn(bank, stock)
    for k in batch:
        assert_close(packed[k], stock[k])
        assert float((mine[k] - theirs[k]).abs().max()) <= 2e-5 * float(theirs[k].abs().max())


def test_a_few_entries_of_a_graft_train_and_are_saved_whole(base, csv_file, tmp_path):
    delta = train(csv_file, base, inject="lora(W_q, 2)", select="random(A_q + B_q, 9)", lr=1e-2, epochs=1).best.delta
    assert delta.meta.trained == 9 + 16 * 2 + 2
    assert all(index is None for index, _ in delta.entries.values()) and len(delta.entries) == 2 * 3
    delta.save(tmp_path / "d.safetensors")
    assert predict(tmp_path / "d.safetensors", TEXTS, base) == predict(delta, TEXTS, base)


@pytest.mark.parametrize(("name", "inject"), SOME_CASES)
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(bases, csv_file, tmp_path, name, inject):
    base = bases(name)
    options = {"inject": inject, "select": "injected", "lr": [1e-2, 3e-2], "epochs": 2}
    whole = train(csv_file, base, **options).best.delta
    out = tmp_path / "d.safetensors"
    with pytest.raises(Interrupted):
        train(csv_file, base, out=out, watch=StopAt(5), **options)
    resumed = train(csv_file, base, out=out, resume=True, **options).best.delta
    assert resumed.encode() == whole.encode()


@pytest.mark.parametrize("inject", GRAFTED.values())
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_trained_delta_answers_alike_alone_applied_and_mixed(bases, csv_file, tmp_path, name, inject):
    base = bases(name)
    delta = train(csv_file, base, inject=inject, select="injected", lr=2e-2, epochs=1).best.delta
    other = train(csv_file, base, select="gamma + bias", lr=1e-2, epochs=1).best.delta
    path = tmp_path / "d.safetensors"
    delta.save(path)
    alone = predict(path, TEXTS, base)
    requests = [((delta, other)[i % 2], text) for i, text in enumerate(TEXTS)]
    for i, answer in enumerate(predict(requests, base=base)):
        expected = alone[i] if i % 2 == 0 else predict(other, [TEXTS[i]], base)[0]
        np.testing.assert_allclose(list(answer["scores"].values()), list(expected["scores"].values()), atol=1e-5)
    before = {key: value.clone() for key, value in base.encoder.state_dict().items()}
    batch = Model(base, 2)._batch(Encoder(base)(TEXTS))
    with torch.no_grad():
        plain = base.encoder(**batch).last_hidden_state
        undo = delta.apply(base)
        changed = base.encoder(**batch).last_hidden_state
        undo()
        assert torch.equal(base.encoder(**batch).last_hidden_state, plain) and not torch.equal(changed, plain)
    assert all(torch.equal(value, before[key]) for key, value in base.encoder.state_dict().items())


def spoiled(delta, changes):
    """The delta with other tensors; None takes one away."""
    tensors = {**delta.tensors, **changes}
    return Delta({name: value for name, value in tensors.items() if value is not None}, delta.meta)


@pytest.mark.parametrize(("name", "inject"), SOME_CASES)
def test_tensors_of_a_graft_with_another_shape_or_elsewhere_are_refused(bases, csv_file, name, inject):
    base = bases(name)
    delta = train(csv_file, base, inject=inject, select="injected", lr=1e-3, epochs=1).best.delta
    model = Model(base, 2, delta.meta.pool)
    grafted = [key for key in delta.tensors if key not in base.parameters and not key.startswith("head.")]
    assert grafted
    for key in grafted:
        value = delta.tensors[key]
        for changes in ({key: value[None]}, {key: None, f"nowhere.{key}": value}):
            with pytest.raises(DeltaError):
                lane_of_delta(model, spoiled(delta, changes))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_tensors_of_a_stranger_that_do_not_fit_are_refused(bases, csv_file, name):
    base = bases(name)
    both = "lora(W_q + W_m3, 2) + adapter(3)"
    delta = train(csv_file, base, inject=both, select="injected", lr=1e-3, epochs=1).best.delta
    model = Model(base, 2, delta.meta.pool)
    lane_of_delta(model, delta)
    first = next(key for key in delta.tensors if ".lora_A" in key)
    second = first.replace(".lora_A", ".lora_B")
    down = next(key for key in delta.tensors if key.endswith("adapter_down.weight"))
    zeros = lambda *shape: np.zeros(shape, np.float32)  # noqa: E731
    bad = [
        {first: None},
        {second: None},
        {first: zeros(3, delta.tensors[first].shape[1])},
        {first: zeros(2)},
        {first: zeros(0, delta.tensors[first].shape[1]), second: zeros(delta.tensors[second].shape[0], 0)},
        {first.replace(".lora_A", ".lora_scale"): zeros(2)},
        {first.replace(".lora_A", ".lora_A_x"): zeros(2, 16), second.replace(".lora_B", ".lora_B_x"): zeros(16, 2)},
        {"nowhere.lora_A": zeros(2, 16), "nowhere.lora_B": zeros(16, 2)},
        {down: None},
        {down: zeros(4, 16)},
        {"nowhere.adapter_down.weight": zeros(3, 16)},
        {first: None, first + ".index": np.arange(3), first + ".value": zeros(3)},
    ]
    for changes in bad:
        with pytest.raises(DeltaError):
            lane_of_delta(model, spoiled(delta, changes))


def test_adapters_go_nowhere_but_behind_m1_and_m3(base, csv_file):
    delta = train(csv_file, base, inject="adapter(3)", select="injected", lr=1e-3, epochs=1).best.delta
    stem = "encoder.layer.0.attention.output.dense.adapter_"
    moved = {key.replace(stem, "encoder.layer.0.attention.self.query.adapter_"): v for key, v in delta.tensors.items()}
    with pytest.raises(DeltaError, match="neither m1 nor m3"):
        lane_of_delta(Model(base, 2, delta.meta.pool), Delta(moved, delta.meta))


@pytest.mark.parametrize(
    ("inject", "message"),
    [
        ("lora(W_q)", r"write lora\(SELECTION, r\)"),
        ("lora(W_q, 0)", "rank"),
        ("lora(W_q, 2.5)", "rank"),
        ("lora(W_q, 2, 0)", "alpha"),
        ("lora(b_q, 2)", "matrices inside the layers"),
        ("lora(W_emb, 2)", "matrices inside the layers"),
        ("lora(random(W_q, 3), 2)", "whole matrices"),
        ("lora(none, 2)", "selects no matrix"),
        ("lora(W_zz, 2)", "no term"),
        ("lora(W_q, 2) + lora(W_q, 3)", "only one graft of each kind"),
        ("adapter()", r"write adapter\(WIDTH\)"),
        ("adapter(x)", r"write adapter\(WIDTH\)"),
        ("lorra(W_q, 2)", 'no graft "lorra".* Did you mean "lora"'),
        ("lora(W_q, 2", r"\)"),
        ("lora(W_q, 2) & b_q", r"\)"),
        ("", "empty"),
    ],
)
def test_a_graft_that_makes_no_sense_is_refused(base, csv_file, inject, message):
    with pytest.raises(SelectionError, match=message):
        train(csv_file, base, inject=inject, select="injected", lr=1e-3)


def test_a_selection_that_trains_nothing_of_a_graft_is_refused(base, csv_file):
    with pytest.raises(UsageError, match="--select injected does"):
        train(csv_file, base, inject="lora(W_q, 2)", select="bias", lr=1e-3)


def test_injected_without_inject_says_what_to_add(base, csv_file):
    with pytest.raises(UsageError, match=r'add parameters first, e.g. --inject "lora'):
        train(csv_file, base, select="injected", lr=1e-3)


@pytest.mark.parametrize("inject", GRAFTED.values())
def test_the_change_of_a_graft_is_counted_from_its_start(base, csv_file, inject):
    still = train(csv_file, base, inject=inject, select="injected", lr=1e-9, epochs=1, seed=3).best.delta
    assert still.change and max(value for row in still.change.values() for value in row if value is not None) < 1e-6


def test_counts_and_terms_are_those_of_the_papers(base, folders):
    found = count(base, "injected", inject="lora(W_q + W_v, 2)")
    assert found.selection.count == 2 * 2 * (2 * 16 + 16 * 2)  # two layers, two matrices, A and B
    assert found.trained["A_q"] == found.trained["B_v"] == 2 * 2 * 16
    adapters = count(str(folders("bert") / "config.json"), "injected + layernorm", inject="adapter(4)")
    assert adapters.trained["W_down_m1"] == adapters.trained["W_up_m3"] == 2 * 4 * 16
    assert adapters.trained["b_down_m1"] == 2 * 4 and adapters.trained["b_up_m3"] == adapters.trained["b_LN1"] == 2 * 16
    assert count(base, "B_q@1", inject="lora(W_q, 2)").selection.count == 32


def test_outputs_and_gradients_are_those_of_pefts_lora(bases):
    import peft

    base = bases("bert")
    bank = bank_of(base, "lora(W_q + W_v, 4, 6)")
    whole, values = copy.deepcopy(bank.model.head_model), bank.tensors(0)
    for name, value in values.items():
        if name.startswith("head."):
            owner, _, leaf = name.removeprefix("head.").rpartition(".")
            whole.get_submodule(owner)._parameters[leaf] = torch.nn.Parameter(torch.from_numpy(value.copy()))
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["query", "value"], lora_dropout=0.0)
    theirs = peft.get_peft_model(whole, config)
    slopes = {}
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            ours = name.split("bert.", 1)[1].replace(".default.weight", "")
            parameter.data = torch.from_numpy(values[ours].copy())
            slopes[ours] = parameter
    assert len(slopes) == 8
    batch = Encoder(base)(TEXTS)
    expected = theirs.eval()(**bank.model._batch(batch)).logits
    expected.square().sum().backward()
    logits = bank.logits({0: batch})[0]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients_of(bank, logits).items():
        if name in slopes:
            torch.testing.assert_close(gradient, slopes[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inject", GRAFTED.values())
@pytest.mark.parametrize(("name", "pool"), [("bert", "cls"), ("bert", "mean"), ("gpt2", "cls"), ("llama", "cls")])
def test_an_export_answers_as_the_delta_does(bases, csv_file, tmp_path, monkeypatch, name, pool, inject):
    base = bases(name)
    options = {"inject": inject, "select": "injected", "pool": pool, "lr": 3e-2, "epochs": 1}
    delta = train(csv_file, base, **options).best.delta
    folder = export(delta, base, tmp_path / "out")
    assert (folder / "modeling_bitfit.py").exists() == (inject.startswith("adapter") or pool == "mean")
    lines = re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S).group(1)
    monkeypatch.chdir(folder)
    scope: dict = {}
    exec(lines.replace('["a text"]', repr(TEXTS)), scope)
    expected = [list(answer["scores"].values()) for answer in predict(delta, TEXTS, base)]
    np.testing.assert_allclose(scope["logits"].softmax(-1).numpy(), expected, atol=1e-5)


def test_a_merged_export_is_a_plain_model_of_its_class(base, csv_file, tmp_path):
    delta = train(csv_file, base, inject="lora(W_q, 2)", select="injected", lr=3e-2, epochs=1).best.delta
    folder = export(delta, base, tmp_path / "out")
    merged = load_base(folder)
    scale = delta.tensors["encoder.layer.0.attention.self.query.lora_scale"]
    stem = "encoder.layer.0.attention.self.query."
    change = scale * delta.tensors[stem + "lora_B"] @ delta.tensors[stem + "lora_A"]
    assert set(merged.parameters) == set(base.parameters)
    np.testing.assert_allclose(
        merged.values(stem + "weight"), base.values(stem + "weight") + change, rtol=1e-6, atol=1e-7
    )


def test_a_delta_with_grafts_is_served_unfolded(base, csv_file):
    delta = train(csv_file, base, inject="lora(W_v, 2)", select="injected + bias", lr=1e-2, epochs=1).best.delta
    model = Model(base, 2, delta.meta.pool)
    assert serving_form(delta, model) is delta
    with pytest.raises(UsageError, match="cannot be folded"):
        fold(delta, model)
    assert Predictor(delta, base)


@pytest.mark.parametrize("inject", ["lora(W_q, 2)", "adapter(16)"])
def test_a_batch_of_grafts_travels_to_a_model_process_and_is_answered_alike(base, csv_file, monkeypatch, inject):
    workers = pytest.importorskip("bitfit.serve.workers")
    host = Host(base)
    monkeypatch.setattr(workers, "_host_of_process", [host])
    options = {"inject": inject, "select": "injected", "epochs": 1}
    deltas = [outcome.delta for outcome in train(csv_file, base, lr=[1e-2, 3e-2], **options).trials]
    residents = [host.admit(delta) for delta in deltas]
    batch = [(resident, host.read(resident, [text])[0].rows) for text in TEXTS for resident in residents]
    travelled = host.outputs(pickle.loads(workers._pickled(batch)))
    for (resident, own), answer in zip(batch, travelled, strict=True):
        np.testing.assert_allclose(answer, host.outputs([(resident, own)])[0], rtol=1e-5, atol=1e-5)
