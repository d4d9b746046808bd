"""All models of the zoo by name: small copies of what people train, written the way people write them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zoo_attention as attention
import zoo_branches as branches
import zoo_convnets as convnets
import zoo_misc as misc
import zoo_mobile as mobile
import zoo_transformers as transformers
from torch import nn
from zoo_random import images, normal, vectors, words


@dataclass(frozen=True)
class Entry:
    """A model and a batch of two for it; `make` gives the same weights each time."""

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...] | dict[str, Any]]

    def __str__(self) -> str:
        return self.name


def sentences() -> tuple[Any, ...]:
    return (words(),)


ENTRIES = (
    Entry("mlp", convnets.mlp, vectors(3, 4, 4)),
    Entry("lenet5", convnets.lenet5, images(28, 1)),
    Entry("vgg_bn", convnets.vgg_bn, images(32)),
    Entry("resnet18", convnets.resnet18, images(32)),
    Entry("resnet50", convnets.resnet50, images(32)),
    Entry("resnet56", convnets.resnet_cifar, images(16)),
    Entry("resnet_padded", convnets.resnet_padded, images(16)),
    Entry("wide_resnet", convnets.wide_resnet, images(16)),
    Entry("preact_resnet", convnets.preact_resnet, images(16)),
    Entry("regnet", convnets.regnet, images(16)),
    Entry("mobilenet_v2", mobile.mobilenet_v2, images(32)),
    Entry("mobilenet_v3", mobile.mobilenet_v3, images(32)),
    Entry("efficientnet", mobile.efficientnet, images(32)),
    Entry("shufflenet", mobile.shufflenet_v2, images(32)),
    Entry("shufflenet_v1", mobile.shufflenet_v1, images(16)),
    Entry("densenet", branches.densenet, images(16)),
    Entry("inception", branches.inception, images(16)),
    Entry("convnext", branches.convnext, images(32)),
    Entry("unet", branches.unet, images(16)),
    Entry("unet_groupnorm", branches.unet_groupnorm, images(16)),
    Entry("unet_bilinear", branches.unet_bilinear, images(16)),
    Entry("superres", branches.superres, images(16)),
    Entry("gan_generator", branches.gan_generator, vectors(12)),
    Entry("seg_fpn", branches.seg_fpn, images(32)),
    Entry("vit", attention.vit, images(16)),
    Entry("vit_explicit", attention.vit_explicit, images(16)),
    Entry("swin", attention.swin, images(16)),
    Entry("einsum_attention", attention.einsum_attention, sentences),
    Entry("torch_encoder", transformers.torch_encoder, sentences),
    Entry("torch_mha", transformers.torch_mha, vectors(7, 6)),
    Entry("torch_decoder", transformers.torch_decoder, lambda: (words(), normal(2, 7, 6))),
    Entry("hf_bert", transformers.hf_bert, transformers.pair_of_texts),
    Entry("hf_bert_eager", transformers.hf_bert_eager, transformers.text),
    Entry("hf_distilbert", transformers.hf_distilbert, transformers.text),
    Entry("hf_gpt2", transformers.hf_gpt2, transformers.text),
    Entry("hf_llama", transformers.hf_llama, transformers.text),
    Entry("hf_mistral", transformers.hf_mistral, transformers.text),
    Entry("hf_t5", transformers.hf_t5, transformers.source_and_target),
    Entry("hf_vit", transformers.hf_vit, transformers.pixels),
    Entry("hf_whisper", transformers.hf_whisper, transformers.sound_and_target),
    Entry("conv_lstm", misc.conv_lstm, vectors(1, 8, 9)),
    Entry("conv_gru", misc.conv_gru, vectors(1, 8, 9)),
    Entry("shared_module", misc.shared_module, images(16)),
    Entry("tied_autoencoder", misc.tied_autoencoder, vectors(24)),
    Entry("tied_lm", misc.tied_lm, sentences),
    Entry("custom_op", misc.custom_op, images(16)),
    Entry("control_flow", misc.control_flow, vectors(16)),
    Entry("glu_mlp", misc.glu_mlp, vectors(12)),
    Entry("rms_net", misc.rms_net, sentences),
)

ZOO: dict[str, Entry] = {entry.name: entry for entry in ENTRIES}
