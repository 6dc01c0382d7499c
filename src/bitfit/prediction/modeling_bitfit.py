"""A model that was fine-tuned by bitfit and that no class of transformers computes; load with trust_remote_code=True.

bitfit copies this file into an exported folder. It needs torch and transformers, not bitfit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)


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
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.encoder_config = encoder_config or {}
        self.pool = pool  # "mean": the mean of a text's states; "tokens": every state; "cls": the architecture's head
        self.width = width  # of a state
        self.segments = segments  # whether the encoder takes token_type_ids
        self.injected = injected or []  # biases that are added to layers without one
        self.adapters = adapters or {}  # module -> width of the bottleneck on its outputs
        self.activation = activation  # inside these bottlenecks


class _Bitfit(PreTrainedModel):  # type: ignore[misc]
    config_class = BitfitConfig
    base_model_prefix = "model"

    def __init__(self, config: BitfitConfig) -> None:
        super().__init__(config)
        inner = AutoConfig.for_model(**config.encoder_config)
        if config.pool == "cls":
            inner.num_labels = config.num_labels
            self.model = AutoModelForSequenceClassification.from_config(inner)
        else:
            self.model = AutoModel.from_config(inner)
            self.classifier = nn.Linear(config.width, config.num_labels)
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


class BitfitForSequenceClassification(_Bitfit):
    """A head on the mean of a text's states."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        **_: Any,
    ) -> SequenceClassifierOutput:
        """The logits of texts."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        states = self.states(input_ids, attention_mask, token_type_ids)
        if self.config.pool == "cls":
            return SequenceClassifierOutput(logits=states)
        weight = attention_mask.unsqueeze(-1).to(states.dtype)
        means = (states * weight).sum(1) / weight.sum(1).clamp(min=1)
        return SequenceClassifierOutput(logits=self.classifier(means))


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
