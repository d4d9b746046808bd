"""Attention of transformers with heads gone: every number of a module counts what is there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from removal import assert_comes_back, kinds, proven, removed
from torch import Tensor, nn
from zoo_models import ZOO
from zoo_random import VOCAB, normal, seeded, words

from prunus.front import analyse_and_prove


def small_of(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    entry = ZOO[name]
    model = entry.make().eval()
    return removed(model, proven(model, entry.inputs()), entry.inputs(), seed), entry


def attentions(model: nn.Module, kind: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == kind]


def test_bert_and_vit() -> None:
    for name, kind, width in (
        ("hf_bert", "BertSelfAttention", "attention_head_size"),
        ("hf_vit", "ViTAttention", "head_dim"),
    ):
        small, _ = small_of(name, 1)
        for module in attentions(small, kind):
            made = getattr(module, "query" if kind.startswith("Bert") else "q_proj")
            assert getattr(module, width) == 8
            assert module.num_attention_heads * 8 == made.out_features == made.weight.shape[0] < 32
            assert module.scaling == 8**-0.5


def test_distilbert() -> None:
    small, _ = small_of("hf_distilbert")
    for module in attentions(small, "DistilBertSelfAttention"):
        assert module.n_heads * module.attention_head_size == module.out_lin.in_features < 24


def test_gpt2_generates_with_its_cache() -> None:
    small, _ = small_of("hf_gpt2")
    for module in attentions(small, "GPT2Attention"):
        assert module.split_size == module.num_heads * module.head_dim == module.c_proj.nx < 32
        assert module.c_attn.nf == 3 * module.split_size
        assert "nf=" + str(3 * module.split_size) in repr(module.c_attn)
    tokens = words()
    whole = small(input_ids=tokens).logits[:, -1]
    first = small(input_ids=tokens[:, :-1], use_cache=True)
    last = small(input_ids=tokens[:, -1:], past_key_values=first.past_key_values).logits[:, -1]
    torch.testing.assert_close(whole, last, rtol=1e-4, atol=1e-4)


@seeded()
def llama(implementation: str) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=12,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_grouped_queries(implementation: str, tmp_path: Path) -> None:
    model, example = llama(implementation), {"input_ids": words()}
    graph = proven(model, example)
    assert kinds(graph) == {"head": 4, "neuron": 2}
    differ: list[bool] = []
    for seed in range(3):
        small = removed(model, graph, example, seed)
        counts: list[tuple[int, int]] = []
        for module in attentions(small, "LlamaAttention"):
            heads, keys = (layer.out_features // 4 for layer in (module.q_proj, module.k_proj))
            assert heads == keys * module.num_key_value_groups < 12
            counts.append((keys, module.num_key_value_groups))
        differ.append(counts[0] != counts[1])
        assert_comes_back(small, llama(implementation), example, tmp_path / "m.prunus")
    assert any(differ)  # every layer has a number of its own


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_where_queries_alone_go_keys_are_counted_from_the_weights(implementation: str, tmp_path: Path) -> None:
    model, example = llama(implementation), {"input_ids": words()}
    graph = analyse_and_prove(model, example, units="heads", form="eager")
    repeats = [group.name for group in graph.groups if group.size == 3]
    assert len(repeats) == len(graph.groups) - len(repeats) == 2
    graph = analyse_and_prove(model, example, units="heads", form="eager", only=repeats)
    assert sorted(graph.sizes) == sorted(repeats)
    small = removed(model, graph, example)
    for module in attentions(small, "LlamaAttention"):
        assert module.num_key_value_groups < 3
        assert module.k_proj.out_features == 16
    assert_comes_back(small, llama(implementation), example, tmp_path / "m.prunus")


def test_a_width_of_llama(tmp_path: Path) -> None:
    entry = ZOO["hf_llama"]
    model = entry.make().eval()
    graph = proven(model, entry.inputs(), units=["width", "neurons", "heads"])
    assert kinds(graph) == {"width": 1, "neuron": 2, "head": 4}
    small = removed(model, graph, entry.inputs())
    width = small.get_input_embeddings().embedding_dim
    norms = attentions(small, "LlamaRMSNorm")
    assert len(norms) == 5
    assert all(norm.variance_epsilon == pytest.approx(1e-6 * 32 / width) for norm in norms)
    assert_comes_back(small, entry.make().eval(), entry.inputs(), tmp_path / "m.prunus")


def test_t5() -> None:
    small, _ = small_of("hf_t5")
    for module in attentions(small, "T5Attention"):
        assert module.inner_dim == module.n_heads * module.key_value_proj_dim == module.o.in_features < 24
        if module.has_relative_attention_bias:
            assert module.relative_attention_bias.embedding_dim == module.n_heads


def test_whisper() -> None:
    small, _ = small_of("hf_whisper")
    modules = attentions(small, "WhisperAttention")
    assert len(modules) == 6
    for module in modules:
        assert module.embed_dim == module.num_heads * module.head_dim == module.out_proj.in_features < 24


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, use_cache=False,
        )
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )
    ),
    "roberta": lambda: transformers.RobertaForSequenceClassification(
        transformers.RobertaConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=16, pad_token_id=1,
        )
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            use_cache=False,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_others_of_the_same_make(name: str, tmp_path: Path) -> None:
    make = seeded()(OTHERS[name])
    model, example = make().eval(), {"input_ids": words()}
    graph = proven(model, example)
    assert kinds(graph)["head"] >= 2
    small = removed(model, graph, example)
    assert_comes_back(small, make().eval(), example, tmp_path / "m.prunus")
    if name == "phi3":
        own = {module.config.num_attention_heads for module in attentions(small, "Phi3Attention")}
        assert max(own) < model.config.num_attention_heads == small.config.num_attention_heads


def test_widths_of_heads_that_one_number_counts_for_all_are_left_to_the_graph_form() -> None:
    entry = ZOO["hf_vit"]
    model = entry.make().eval()
    eager = analyse_and_prove(model, entry.inputs(), units="head_dims", form="eager")
    assert not eager.groups
    auto = analyse_and_prove(model, entry.inputs(), units="head_dims")
    assert (auto.form, kinds(auto)) == ("graph", {"head dim": 4})


def test_a_class_that_is_only_called_so_keeps_its_numbers() -> None:
    class GPT2Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.head_dim = 2, 4
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8) for _ in range(3))
            self.out = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q_proj, self.k_proj, self.v_proj))
            read = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(read.transpose(1, 2).flatten(2))

    model, example = seeded()(GPT2Attention)(), (normal(2, 5, 8),)
    graph = proven(model, example, units="heads")
    assert removed(model, graph, example).num_heads == 2
