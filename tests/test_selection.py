"""The selection language and the value it names."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitfit.errors import SelectionError
from bitfit.model.anatomy import Anatomy, Site, anatomy
from bitfit.model.language import Init, check, parse_init, select
from bitfit.model.selection import Selection, count_by_term


def bert(layers: int = 3, width: int = 4, wide: int = 6, vocabulary: int = 10) -> Anatomy:
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (vocabulary, width)}
    shapes |= {f"embeddings.LayerNorm.{leaf}": (width,) for leaf in ("weight", "bias")}
    for layer in range(layers):
        stem = f"encoder.layer.{layer}"
        for place in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            shapes |= {f"{stem}.{place}.weight": (width, width), f"{stem}.{place}.bias": (width,)}
        for place in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{stem}.{place}.weight": (width,), f"{stem}.{place}.bias": (width,)}
        shapes |= {f"{stem}.intermediate.dense.weight": (wide, width), f"{stem}.intermediate.dense.bias": (wide,)}
        shapes |= {f"{stem}.output.dense.weight": (width, wide), f"{stem}.output.dense.bias": (width,)}
    return anatomy("bert", shapes | {"pooler.dense.weight": (width, width), "pooler.dense.bias": (width,)})


def gpt2(layers: int = 2, width: int = 4) -> Anatomy:
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (10, width), "ln_f.weight": (width,), "ln_f.bias": (width,)}
    for layer in range(layers):
        shapes |= {f"h.{layer}.attn.c_attn.weight": (width, 3 * width), f"h.{layer}.attn.c_attn.bias": (3 * width,)}
        shapes |= {f"h.{layer}.ln_1.weight": (width,), f"h.{layer}.ln_1.bias": (width,)}
    return anatomy("gpt2", shapes)


BERT, GPT2 = bert(), gpt2()
BASE = bert(layers=12, width=768, wide=3072, vocabulary=28996)
SHAPES: dict[str, tuple[int, ...]] = {"a": (5,), "b": (3, 4), "c": (2, 2), "d": ()}


def names(selection: Selection) -> set[str]:
    return set(selection.entries)


def members(selection: Selection) -> set[tuple[str, int]]:
    """The selection as a plain set, to compare with Python's own set algebra."""
    flat = {n: range(selection.size(n)) if held is None else held.tolist() for n, held in selection.entries.items()}
    return {(name, index) for name, indices in flat.items() for index in indices}


def refusal(model: Anatomy, text: str) -> str:
    with pytest.raises(SelectionError) as caught:
        select(model, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    entries: dict[str, np.ndarray | None] = {}
    for name in draw(st.sets(st.sampled_from(sorted(SHAPES)))):
        indices = st.lists(st.integers(0, math.prod(SHAPES[name]) - 1))
        held = draw(st.none() | indices)
        entries[name] = None if held is None else np.array(held, np.int64)
    return Selection(entries, SHAPES)


expressions = st.recursive(
    st.sampled_from(["b_q", "W_q@1", "bias", "gamma@0-1", "layernorm", "all", "none", "W_emb", 're:".*weight"']),
    lambda inner: st.tuples(inner, st.sampled_from("+-&"), inner).map(lambda part: f"({part[0]} {part[1]} {part[2]})"),
    max_leaves=4,
)
models = st.sampled_from([BERT, GPT2])
matrices = st.sampled_from(["all", "W_q", "W_q + W_k + W_emb", "all@last2", "b_q + W_v"])
seeds = st.integers(0, 2**40)
patient = settings(deadline=None)  # a shared machine may stall any example


# ---- the value -------------------------------------------------------------------------------------------------


@patient
@given(selections(), selections())
def test_the_operators_are_those_of_sets(a: Selection, b: Selection) -> None:
    assert members(a + b) == members(a) | members(b)
    assert members(a - b) == members(a) - members(b)
    assert members(a & b) == members(a) & members(b)
    assert (a == b) == (members(a) == members(b))


@patient
@given(selections(), selections(), selections())
def test_the_laws_of_sets_hold(a: Selection, b: Selection, c: Selection) -> None:
    assert a + b == b + a and a & b == b & a
    assert (a + b) + c == a + (b + c) and (a & b) & c == a & (b & c)
    assert a & (b + c) == (a & b) + (a & c) and a + (b & c) == (a + b) & (a + c)
    assert a + a == a == a & a and a - (b + c) == a - b - c
    assert not a - a


@patient
@given(selections(), selections())
def test_counts_obey_inclusion_and_exclusion(a: Selection, b: Selection) -> None:
    assert (a + b).count + (a & b).count == a.count + b.count
    assert (a - b).count == a.count - (a & b).count


@patient
@given(selections())
def test_a_selection_is_kept_in_one_form(a: Selection) -> None:
    for name, held in a.entries.items():
        assert held is None or (0 < held.size < a.size(name) and (np.diff(held) > 0).all() and held.dtype == np.int64)
    assert list(a.entries) == [name for name in SHAPES if name in a]
    assert bool(a) == (a.count > 0)


def test_a_selection_cannot_be_changed() -> None:
    mine = np.array([3, 1])
    selection = Selection({"a": mine}, SHAPES)
    mine[0] = 0
    held = selection.entries["a"]
    assert held is not None and held.tolist() == [1, 3]
    with pytest.raises(ValueError, match="read-only"):
        held[0] = 2


def test_selections_of_different_models_do_not_combine() -> None:
    with pytest.raises(SelectionError, match="different models"):
        select(BERT, "all") + select(GPT2, "all")
    with pytest.raises(SelectionError, match="another model"):
        count_by_term(BERT, select(GPT2, "all"))


@pytest.mark.parametrize("entries", [{"nowhere": None}, {"a": np.array([5])}, {"a": np.array([-1, 2])}])
def test_entries_outside_the_model_are_refused(entries: dict[str, np.ndarray | None]) -> None:
    with pytest.raises(SelectionError):
        Selection(entries, SHAPES)


# ---- words -----------------------------------------------------------------------------------------------------


def test_a_term_is_its_sites_and_nothing_else() -> None:
    assert names(select(BERT, "b_q")) == {f"encoder.layer.{layer}.attention.self.query.bias" for layer in range(3)}
    assert names(select(BERT, "g_LN2")) == {f"encoder.layer.{layer}.output.LayerNorm.weight" for layer in range(3)}
    assert "pooler.dense.bias" not in select(BERT, "b_q + b_m2")


def test_bias_has_every_bias_and_no_matrix() -> None:
    biases = {name for name in BERT.shapes if name.endswith(".bias")}
    assert names(select(BERT, "bias")) == biases
    mpnet = anatomy("mpnet", {"encoder.relative_attention_bias.weight": (32, 2), "embeddings.LayerNorm.bias": (4,)})
    assert names(select(mpnet, "bias")) == {"embeddings.LayerNorm.bias"}


def test_layernorm_is_the_gammas_and_their_biases() -> None:
    assert select(BERT, "layernorm") == select(BERT, "gamma + b_LN1 + b_LN2 + b_emb")
    assert select(GPT2, "layernorm") == select(GPT2, "g_LN1 + b_LN1 + g_other + b_other")


def test_groups_work_on_an_unknown_architecture() -> None:
    strange = anatomy("made-up", {"x.weight": (3, 3), "x.bias": (3,), "norm.weight": (3,)})
    assert names(select(strange, "bias + gamma")) == {"x.bias", "norm.weight"}
    assert "It offers: b_other, g_other, W_other." in refusal(strange, "b_q")
    assert "does not know the layers" in refusal(strange, "bias@0")


def test_all_and_none_are_the_ends() -> None:
    assert select(BERT, "all").count == BERT.total
    assert not select(BERT, "none")
    assert select(BERT, "bias + gamma") + select(BERT, "all - bias - gamma") == select(BERT, "all")


def test_a_pattern_matches_whole_names_only() -> None:
    assert select(BERT, r"re:encoder\.layer\.\d+\.attention\.self\.query\.bias") == select(BERT, "b_q")
    assert "the pattern matches no parameter name" in refusal(BERT, "b_k + re:query")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("re:.*query.bias+b_k", None),
        ("re:.*query.bias + b_k", "b_q + b_k"),
        ("(re:.*(query|key).bias)", "b_q + b_k"),
        ("re:.*[)q]uery.bias", "b_q"),
        (r"re:.*quer\y?.bias", None),
        ("re:.*query.bias@1", "b_q@1"),
        ('re:".*query.bias"+b_k', "b_q + b_k"),
        ("random(re:.{1,60}query.bias, 12)", "b_q"),
    ],
)
def test_a_pattern_ends_where_one_expects(text: str, same: str | None) -> None:
    if same is None:
        refusal(BERT, text)
    else:
        assert select(BERT, text) == select(BERT, same)


# ---- layers and operators --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("b_q@0-2", "b_q"),
        ("b_q@last1", "b_q@2"),
        ("bias@last2", "bias@1-2"),
        ("bias@0-2", "bias - b_emb - b_pool"),
        ("(b_q + b_m2)@1", "b_q@1 + b_m2@1"),
        ("b_q@0-1-b_q@1", "b_q@0"),
        ("b_q@0-b_k", "b_q@0"),
        ("b_pool@0", "none"),
        ("b_q + b_k & b_k", "b_q + b_k"),
        ("b_q & b_k + b_k", "b_k"),
        ("all - b_q - b_q", "all - b_q"),
        ("b_q - (b_q - b_q)", "b_q"),
        ("b_q - b_q + b_q", "b_q"),
        ("bias & b_q & b_q@1", "b_q@1"),
        ("(b_q + b_m2) & bias@0-1", "b_q@0-1 + b_m2@0-1"),
        (" b_q\n+\tb_k ", "b_k+b_q"),
        ("((b_q@0-1))@1-2", "b_q@1"),
    ],
)
def test_two_texts_name_the_same_entries(text: str, same: str) -> None:
    assert select(BERT, text) == select(BERT, same)


@pytest.mark.parametrize("text", ["b_q@3", "b_q@0-3", "b_q@last4", "none@7"])
def test_a_layer_the_model_lacks_is_refused(text: str) -> None:
    assert "It has 3 layers: 0 to 2." in refusal(BERT, text)


def test_albert_has_one_layer() -> None:
    albert = anatomy("albert", {"encoder.albert_layer_groups.0.albert_layers.0.attention.query.bias": (4,)})
    assert select(albert, "b_q@0").count == 4
    assert "It has 1 layer: 0." in refusal(albert, "b_q@1")


def test_a_term_the_model_lacks_is_refused_with_those_it_offers() -> None:
    message = refusal(GPT2, "b_q + b_pool")
    assert message.startswith(
        'b_q + b_pool: this model does not have the term "b_pool" at character 7. It offers: b_q, b_k, b_v'
    )
    assert "--inject" not in message


@pytest.mark.parametrize(("term", "graft"), [("A_q", '"lora(W_q + W_v, 8)"'), ("W_down_m1", '"adapter(64)"')])
def test_a_term_of_a_graft_that_is_not_added_says_what_adds_it(term: str, graft: str) -> None:
    assert refusal(GPT2, term).endswith(f"--inject adds it, e.g. --inject {graft}.")


# ---- slices of a shared tensor ---------------------------------------------------------------------------------


def test_gpt2_q_k_and_v_are_disjoint_parts_of_one_tensor() -> None:
    q, k, v = (select(GPT2, f"b_{place}@0").entries["h.0.attn.c_attn.bias"] for place in "qkv")
    assert [held.tolist() for held in (q, k, v) if held is not None] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert not select(GPT2, "(b_q & b_k) + (W_q & W_v)")
    assert select(GPT2, "b_q + b_k + b_v").entries["h.1.attn.c_attn.bias"] is None


def test_gpt2_matrices_are_cut_by_column() -> None:
    held = select(GPT2, "W_k@0").entries["h.0.attn.c_attn.weight"]
    expected = np.arange(48).reshape(4, 12)[:, 4:8].ravel()
    assert held is not None and held.tolist() == expected.tolist()


@patient
@given(models, expressions, st.integers(0, 100), seeds)
def test_counts_by_term_are_exact(model: Anatomy, text: str, percent: int, seed: int) -> None:
    selection = select(model, f"random({text}, {percent}%)", seed)
    counts = count_by_term(model, selection)
    assert tuple(counts) == model.terms
    assert sum(counts.values()) == selection.count
    assert counts == {term: (selection & select(model, term)).count for term in model.terms}


# ---- samples ---------------------------------------------------------------------------------------------------


@patient
@given(models, expressions, st.data(), seeds)
def test_a_sample_is_exact_in_count_and_inside_its_operand(
    model: Anatomy, text: str, data: st.DataObject, seed: int
) -> None:
    operand = select(model, text)
    asked = data.draw(st.integers(0, operand.count))
    sample = select(model, f"random({text}, {asked})", seed)
    assert sample.count == len(members(sample)) == asked
    assert not sample - operand
    assert sample == select(model, f"random({text}, {asked})", seed)
    assert sample == select(model, f"random({text}, {asked}, seed={seed})", seed + 1)


@patient
@given(seeds, seeds)
def test_another_seed_draws_another_sample(one: int, other: int) -> None:
    # 250 of some 500 entries: that two draws agree by chance will not be seen.
    same = select(BERT, "random(all, 50%)", one) == select(BERT, "random(all, 50%)", other)
    assert same == (one == other)


def test_two_samples_of_one_text_differ() -> None:
    assert select(BERT, "random(all, 50%) & random(all, 50%)").count < BERT.total // 2
    assert select(BERT, "random(all, 50%, seed=1) - random(all, 50%, seed=1)")


def test_every_entry_is_drawn_equally_often() -> None:
    counts = np.zeros(12)
    for seed in range(1200):
        counts[select(GPT2, "random((b_q + b_k + b_v)@0, 3)", seed).entries["h.0.attn.c_attn.bias"]] += 1
    assert counts.sum() == 3600
    assert abs(counts - 300).max() < 75  # five standard deviations


@pytest.mark.parametrize(
    ("percent", "count"), [("0.1", 0), ("50", 6), ("12.5", 2), ("12.4", 1), (".5", 0), ("100", 12)]
)
def test_a_percentage_is_rounded_to_the_nearest_entry(percent: str, count: int) -> None:
    assert select(BERT, f"random(b_q, {percent}%)").count == count


def test_a_sample_larger_than_its_operand_is_refused() -> None:
    message = refusal(BERT, "b_k + random(b_q, 13)")
    assert message == "b_k + random(b_q, 13): cannot take 13 of 12 entries at character 7."
    assert "cannot take" in refusal(BERT, "random(b_q, 110%)")


def test_the_order_of_the_parameters_does_not_change_a_sample() -> None:
    backwards = anatomy("bert", dict(reversed(BERT.shapes.items())))
    for text in ("random(all, 9%)", "rowcol(all, 9%)"):
        assert members(select(backwards, text)) == members(select(BERT, text))


@patient
@given(models, matrices, st.integers(30, 100), seeds)
def test_rowcol_takes_whole_rows_or_columns_up_to_what_was_asked(
    model: Anatomy, text: str, percent: int, seed: int
) -> None:
    operand = select(model, text)
    sample = select(model, f"rowcol({text}, {percent}%)", seed)
    asked = math.floor(operand.count * percent / 100 + 0.5)
    assert 0 < sample.count == len(members(sample)) <= asked
    assert not sample - operand
    assert all(is_striped(mask_of(site, sample)) for site in model.sites if len(site.shape) == 2)
    assert all(len(sample.shapes[name]) == 2 for name in sample.entries)
    assert f"took {sample.count:,} of {asked:,} requested entries" in sample.notes[0]


def mask_of(site: Site, sample: Selection) -> np.ndarray:
    mask = np.zeros(math.prod(site.shape), bool)
    if site.name in sample:
        held = sample.entries[site.name]
        mask[slice(None) if held is None else held] = True
    rows, columns = site.span(0), site.span(1)
    return mask.reshape(site.shape)[rows.start : rows.stop, columns.start : columns.stop]


def is_striped(mask: np.ndarray) -> bool:
    return bool((mask == mask[:, :1]).all() or (mask == mask[:1]).all())


def test_rowcol_leaves_no_room_for_another_unit() -> None:
    for seed in range(50):
        sample = select(BERT, "rowcol(W_q, 23)", seed)
        assert sample.count == 20
        assert re.fullmatch(
            r"rowcol\(W_q, 23\) took 20 of 23 requested entries: \d rows and \d columns", sample.notes[0]
        )


def test_rowcol_draws_rows_as_well_as_columns() -> None:
    notes = {select(BERT, "rowcol(W_q@0, 4)", seed).notes[0].rpartition(": ")[2] for seed in range(20)}
    assert notes == {"1 rows and 0 columns", "0 rows and 1 columns"}


def test_rowcol_without_a_whole_matrix_is_refused() -> None:
    assert "no entirely selected matrix" in refusal(BERT, "rowcol(bias, 50%)")
    assert "no entirely selected matrix" in refusal(BERT, "rowcol(random(W_q@0, 15), 50%)")


def test_rowcol_of_less_than_a_unit_names_the_smallest() -> None:
    assert "smallest row or column drawn, which has 4," in refusal(BERT, "rowcol(W_q, 3)")


def test_whole_tensors_of_large_models_stay_whole() -> None:
    everything = select(BASE, "all")
    rest = select(BASE, "all - b_q")
    sample = select(BASE, "random(all, 0.1%)")
    assert everything.count == BASE.total > 100_000_000
    assert all(held is None for held in (everything.entries | rest.entries).values())
    assert sample.count == round(BASE.total / 1000)


# ---- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("b_q + b_m4", 7, 'no term "b_m4"'),
        ("biass", 1, 'Did you mean "bias"?'),
        ("b_q + b_ln1", 7, 'Did you mean "b_LN1"?'),
        ("rand(all, 1%)", 1, 'Did you mean "random"?'),
        ("b_q b_k", 5, "expected one of + - &"),
        ("b_q, b_k", 4, "expected one of + - &"),
        ("b_q +", 6, "the end"),
        ("(b_q + b_k", 11, '")"'),
        ("b_q)", 4, '")"'),
        ("- b_q", 1, "expected a term"),
        ("b_q * b_k", 5, 'unexpected "*"'),
        ("b_q@", 4, "@0-5"),
        ("b_q@last", 4, "@last4"),
        ("b_q@5-3", 4, "empty"),
        ("b_q@last0", 4, "empty"),
        ("re:( + b_q", 1, "regular expression"),
        ('b_q + re:"abc', 10, "never closed"),
        ("random(all)", 11, '","'),
        ("random", 7, '"("'),
        ("random(all, 1.5)", 13, "whole number, a percentage"),
        ("random(all, 5, sed=1)", 16, "seed="),
        ("random(all, 5, seed=x)", 21, "whole number"),
        ("random(all, 5)@1", 15, "layers after a sample"),
        ("b_q\n+ b_zzz", 7, "no term"),
    ],
)
def test_a_text_that_does_not_parse_is_pointed_at(text: str, at: int, says: str) -> None:
    with pytest.raises(SelectionError) as caught:
        check(text)
    message = str(caught.value)
    assert says in message and f" at character {at}." in message
    assert "\n" not in message


def test_the_refusal_of_a_term_reads_as_promised() -> None:
    message = refusal(BERT, "b_q + b_m4")
    assert message.startswith('b_q + b_m4: no term "b_m4" at character 7. Did you mean "b_m')
    assert "Known: b_q, b_k, b_v" in message


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_text_is_refused(text: str) -> None:
    assert 'write "none"' in refusal(BERT, text)


def test_deep_and_long_texts_do_not_exhaust_the_stack() -> None:
    assert "nested" in refusal(BERT, "(" * 10_000 + "b_q" + ")" * 10_000)
    assert "nested" in refusal(BERT, "random(" * 10_000)
    assert select(BERT, " + ".join(["b_q"] * 2_000)) == select(BERT, "b_q")


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(SelectionError, match="negative"):
        select(BERT, "bias", seed=-1)


@patient
@given(st.text(alphabet="b_qLN1 re:@0-+&(),=%.\"'\\last random", max_size=25))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        select(BERT, text)
    except SelectionError as refused:
        assert "\n" not in str(refused)


# ---- start values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inits"),
    [
        ("keep", [Init("keep")]),
        ("zero(bias)", [Init("zero", "bias")]),
        ("reinit( all )", [Init("reinit", "all")]),
        ("zero(b_q)+reinit(W_q)", [Init("zero", "b_q"), Init("reinit", "W_q")]),
        ("zero((b_q + b_k)@0) + keep", [Init("zero", "(b_q + b_k)@0"), Init("keep")]),
        ("reinit(random(all, 1%, seed=3))", [Init("reinit", "random(all, 1%, seed=3)")]),
        ('zero(re:".*[)]")', [Init("zero", 're:".*[)]"')]),
    ],
)
def test_start_values_are_read(text: str, inits: list[Init]) -> None:
    assert list(parse_init(text)) == inits


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("", 1, "no start value"),
        ("zeros(bias)", 1, 'Did you mean "zero"?'),
        ("zero", 5, '"("'),
        ("zero(b_m4)", 6, 'no term "b_m4"'),
        ("zero(bias", 10, '")"'),
        ("zero(bias) - keep", 12, "expected + or the end"),
        ("keep +", 7, "no start value"),
    ],
)
def test_start_values_that_do_not_parse_are_pointed_at(text: str, at: int, says: str) -> None:
    with pytest.raises(SelectionError) as caught:
        parse_init(text)
    assert says in str(caught.value) and f" at character {at}." in str(caught.value)


@pytest.mark.parametrize("model", [BERT, GPT2])
def test_a_sample_can_be_as_large_as_another_selection(model: Anatomy) -> None:
    sample = select(model, "random(all - W_emb, count(bias))")
    assert sample.count == select(model, "bias").count
    assert not sample & select(model, "W_emb")


def test_each_draws_its_share_of_every_tensor() -> None:
    whole = select(BERT, "bias")
    sample = select(BERT, "each(bias, 50%)")
    assert sample.count == round(whole.count / 2)
    for name in whole.entries:
        held = sample.entries[name]
        assert held is not None and abs(held.size - whole.size(name) / 2) <= 1
    assert select(BERT, "each(bias, 50%)", 1) != sample


def test_an_amount_that_is_none_says_what_it_can_be() -> None:
    assert "expected a whole number, a percentage or count(...)" in refusal(BERT, "random(all, bias)")
