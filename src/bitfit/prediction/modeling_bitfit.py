"""A model that was fine-tuned by bitfit and that no class of transformers computes; load with trust_remote_code=True.

bitfit copies this file into an exported folder. It needs torch and transformers, not bitfit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

RELATION = 4  # vectors of which the head of a pair reads: u, v, |u - v| and u * v


class BitfitConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of the encoder, and what the head reads."""

    model_type = "bitfit"

    def __init__(
        self,
        encoder_config: dict[str, Any] | None = None,
        pool: str = "mean",
        width: int = 1,
        segments: bool = False,
        injected: list[str] | None = None,
        adapters: dict[str, int] | None = None,
        activation: str = "gelu",
        pair: dict[str, int] | None = None,
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.encoder_config = encoder_config or {}
        # "mean": the mean of a text's states; "pair": the relation of the means of two texts; "tokens": every state;
        # "cls": what the architecture's head reads.
        self.pool = pool
        self.width = width  # of a state
        self.segments = segments  # whether the encoder takes token_type_ids
        self.injected = injected or []  # biases that are added to layers without one
        self.adapters = adapters or {}  # module -> width of the bottleneck on its outputs
        self.activation = activation  # inside these bottlenecks
        self.pair = pair or {}  # how a pair is taken apart: the arguments of `texts_of_pairs`


class _Bitfit(PreTrainedModel):  # type: ignore[misc]
    config_class = BitfitConfig
    base_model_prefix = "model"

    def __init__(self, config: BitfitConfig) -> None:
        super().__init__(config)
        inner = AutoConfig.for_model(**config.encoder_config)
        inner.dtype = None  # that of this model, not that of the base's file
        if config.pool == "cls":
            inner.num_labels = config.num_labels
            self.model = AutoModelForSequenceClassification.from_config(inner)
        else:
            self.model = AutoModel.from_config(inner)
            inputs = RELATION * config.width if config.pool == "pair" else config.width
            self.classifier = nn.Linear(inputs, config.num_labels)
        for name in config.injected:
            layer = self.encoder.get_submodule(name.removesuffix(".bias"))
            layer.register_parameter("injected_bias", nn.Parameter(torch.zeros(len(layer.weight))))
            layer.register_forward_hook(_add_bias)
        add_adapters(self.encoder, config)
        self.post_init()

    @property
    def encoder(self) -> Any:
        """The encoder without a head."""
        return self.model.base_model if self.config.pool == "cls" else self.model

    def states(self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None) -> Any:
        """The encoder's states; with pool "cls" the logits of the architecture's head."""
        batch = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.config.segments and token_type_ids is not None:
            batch["token_type_ids"] = token_type_ids
        output = self.model(**batch)
        return output.logits if self.config.pool == "cls" else output.last_hidden_state


def add_adapters(encoder: Any, config: BitfitConfig) -> None:
    """Add the bottlenecks of a configuration to the outputs of their modules."""
    activation = ACT2FN[config.activation]

    def add(layer: Any, _: Any, output: Tensor) -> Any:
        return output + layer.adapter_up(activation(layer.adapter_down(output)))

    for name, width in config.adapters.items():
        layer = encoder.get_submodule(name)
        # The rows of a matrix are the outputs in nn.Linear, the columns in GPT-2's Conv1D.
        outputs = layer.weight.shape[0 if isinstance(layer, nn.Linear) else 1]
        layer.adapter_down = nn.Linear(outputs, width)
        layer.adapter_up = nn.Linear(width, outputs)
        layer.register_forward_hook(add)


def _add_bias(layer: Any, _: Any, output: Tensor) -> Any:
    return output + layer.injected_bias


def texts_of_pairs(
    ids: Tensor, mask: Tensor, separator: int, separators: int, padding: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """Ids and mask of the texts of joint pairs, each text a row: first, second, first, ...

    `separators`: how many separators are between the two texts. `max_length`: where each text is cut.
    """
    texts = []
    for row, is_token in zip(ids, mask.bool(), strict=True):
        for text in _taken_apart(row[is_token], separator, separators):
            texts.append(text if len(text) <= max_length else torch.cat([text[: max_length - 1], text[-1:]]))
    masks = [torch.ones_like(text) for text in texts]
    return pad_sequence(texts, batch_first=True, padding_value=padding), pad_sequence(masks, batch_first=True)


def _taken_apart(tokens: Tensor, separator: int, separators: int) -> tuple[Tensor, Tensor]:
    """The two texts of a pair, each with the special tokens of a single text: the first token and a separator."""
    found = (tokens == separator).nonzero()
    if not len(found):
        raise ValueError("this model reads pairs with their special tokens: tokenizer(first, second)")
    end = int(found[0]) + 1
    second = tokens[end + separators - 1 :]
    if not len(second):  # transformers leaves out an empty second text that is not in a list
        second = tokens[end - 1 : end]
    return tokens[:end], torch.cat([tokens[:1], second])


def relation(first: Tensor, second: Tensor) -> Tensor:
    """Two texts as [u, v, |u - v|, u * v]; u and v are their states, scaled to a mean square of 1."""
    u, v = _scaled(first), _scaled(second)
    return torch.cat([u, v, (u - v).abs(), u * v], -1)


def _scaled(states: Tensor) -> Tensor:
    return nn.functional.normalize(states, dim=-1) * math.sqrt(states.shape[-1])


class BitfitForSequenceClassification(_Bitfit):
    """A head on the mean of a text's states, or on the relation of those of two texts."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """The logits of texts, or of pairs that the tokenizer joined."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if self.config.pool == "pair":
            input_ids, attention_mask = texts_of_pairs(input_ids, attention_mask, **self.config.pair)
            token_type_ids = None  # each text is a first one
        states = self.states(input_ids, attention_mask, token_type_ids)
        if self.config.pool == "cls":
            return SequenceClassifierOutput(logits=states)
        weight = attention_mask.unsqueeze(-1).to(states.dtype)
        means = (states * weight).sum(1) / weight.sum(1).clamp(min=1)
        inputs = relation(means[0::2], means[1::2]) if self.config.pool == "pair" else means
        return SequenceClassifierOutput(logits=self.classifier(inputs))


class BitfitForTokenClassification(_Bitfit):
    """A head on every state."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> TokenClassifierOutput:
        """The logits of tokens."""
        return TokenClassifierOutput(logits=self.classifier(self.states(input_ids, attention_mask, token_type_ids)))


class BitfitForQuestionAnswering(_Bitfit):
    """A head on every state, with a logit for the start of an answer and one for its end."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> QuestionAnsweringModelOutput:
        """The logits of starts and ends."""
        logits = self.classifier(self.states(input_ids, attention_mask, token_type_ids))
        return QuestionAnsweringModelOutput(start_logits=logits[..., 0], end_logits=logits[..., 1])
