"""Transformers as the libraries ship them: PyTorch's own layers, and small ones of Hugging Face's models."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from zoo_random import VOCAB, normal, padding, seeded, words


def text() -> dict[str, Any]:
    return {"input_ids": words(), "attention_mask": padding()}


def pair_of_texts() -> dict[str, Any]:
    kinds = torch.zeros(2, 9, dtype=torch.long)
    kinds[:, 5:] = 1
    return {**text(), "token_type_ids": kinds}


def source_and_target() -> dict[str, Any]:
    return {**text(), "decoder_input_ids": words(7, seed=2)}


def sound_and_target() -> dict[str, Any]:
    return {"input_features": normal(2, 8, 32), "decoder_input_ids": words(7)}


def pixels() -> dict[str, Any]:
    return {"pixel_values": normal(2, 3, 16, 16)}


def bert_config() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=16,
        num_labels=3,
    )


@seeded()
def hf_bert() -> nn.Module:
    return transformers.BertForSequenceClassification(bert_config())


@seeded()
def hf_bert_eager() -> nn.Module:
    return transformers.BertForMaskedLM._from_config(bert_config(), attn_implementation="eager")


@seeded()
def hf_distilbert() -> nn.Module:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=24, n_layers=2, n_heads=3, hidden_dim=40, max_position_embeddings=16, num_labels=3
    )
    return transformers.DistilBertForSequenceClassification(config)


@seeded()
def hf_gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


@seeded()
def hf_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


@seeded()
def hf_mistral() -> nn.Module:
    config = transformers.MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=32,
        sliding_window=4,
        use_cache=False,
    )
    return transformers.MistralForCausalLM(config)


@seeded()
def hf_t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=24,
        d_kv=6,
        d_ff=40,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


@seeded()
def hf_vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


@seeded()
def hf_whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB,
        num_mel_bins=8,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=16,
        max_target_positions=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config)


class EncoderClassifier(nn.Module):
    """Words and places, two encoder layers, and the first word's class."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.zeros(1, 12, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, dim_feedforward=40, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.classifier = nn.Linear(dim, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.pos[:, : tokens.size(1)]
        x = self.encoder(x)
        return self.classifier(x[:, 0, :])


class SelfAttentionClassifier(nn.Module):
    """Frames of a signal, one layer of PyTorch's attention with a residual, pooled."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.proj = nn.Linear(6, dim)
        self.attn = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 5))

    def forward(self, frames: Tensor) -> Tensor:
        x = self.proj(frames)
        attended, _ = self.attn(x, x, x, need_weights=False)
        x = self.norm(x + attended)
        return self.fc(x.mean(1))


class DecoderModel(nn.Module):
    """A causal decoder that looks at a memory; batch second, as the layer has it by default."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.memory_proj = nn.Linear(6, dim)
        layer = nn.TransformerDecoderLayer(d_model=dim, nhead=4, dim_feedforward=32, activation="gelu", norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, num_layers=2, norm=nn.LayerNorm(dim))
        self.generator = nn.Linear(dim, VOCAB)

    def forward(self, tokens: Tensor, memory: Tensor) -> Tensor:
        tgt = self.embed(tokens).transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(0), device=tgt.device, dtype=tgt.dtype)
        out = self.decoder(tgt, self.memory_proj(memory).transpose(0, 1), tgt_mask=mask, tgt_is_causal=True)
        return self.generator(out).transpose(0, 1)


@seeded()
def torch_encoder() -> nn.Module:
    return EncoderClassifier()


@seeded()
def torch_mha() -> nn.Module:
    return SelfAttentionClassifier()


@seeded()
def torch_decoder() -> nn.Module:
    return DecoderModel()
