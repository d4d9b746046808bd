"""Models of the size that people deploy, and small ones with their inputs for the command line to import."""

from typing import Any

import torch
import transformers
from torch import nn
from zoo_attention import FusedAttention, VisionTransformer
from zoo_convnets import Bottleneck, ResNet
from zoo_models import ZOO
from zoo_random import normal

Example = tuple[nn.Module, tuple[Any, ...] | dict[str, Any]]


def resnet50_real(batch: int = 1) -> Example:
    """ResNet-50 for ImageNet: 25,557,032 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ResNet(Bottleneck, (3, 4, 6, 3), width=64, classes=1000)
    return model.eval(), (normal(batch, 3, 224, 224),)


def vit_b16_real(batch: int = 1) -> Example:
    """ViT-B/16 for ImageNet: 86,567,656 parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(
            FusedAttention, size=224, patch=16, dim=768, depth=12, heads=12, ratio=4, classes=1000
        )
    return model.eval(), (normal(batch, 3, 224, 224),)


def llama_1b_meta(batch: int = 1, length: int = 16) -> Example:
    """The shape of Llama-3.2-1B, without values: 1,235,814,400 parameters on the meta device.

    It can be exported, but not run: transformers reads the values of the mask when it is not being traced.
    """
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        inputs = torch.zeros(batch, length, dtype=torch.long)
        return model.eval(), {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}


def example(name: str) -> Example:
    entry = ZOO[name]
    return entry.make().eval(), entry.inputs()


def resnet50() -> Example:
    return example("resnet50")


def vit() -> Example:
    return example("vit")


def llama() -> Example:
    return example("hf_llama")
