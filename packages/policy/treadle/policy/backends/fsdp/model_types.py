"""The types of models that the FSDP backend is compared with transformers on, and those it refuses.

Invariant: each type of a causal language model that transformers has is in one of these. The tables
of docs/models.md are these; `tests/model_types` keeps both true.
"""

from collections.abc import Mapping
from typing import Final

_PACKED: Final = """
    afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe ctrl cwm
    deepseek_v2 deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo
    flint gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
    glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe
    granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text mellum
    mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder
    nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe
    seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
PACKED: Final = tuple(_PACKED.split())
"""Sequences go through them packed end to end."""
SHARED: Final = frozenset(PACKED)
"""Context ranks share their rows."""
_IN_ROWS: Final = """
    bailing_hybrid bamba biogpt bloom codegen deepseek_v4 falcon falcon_h1 falcon_mamba gpt_neo
    gpt_neox_japanese gptj granitemoehybrid inkling_text jamba lfm2 lfm2_moe lfm3 mamba mamba2
    minimax mpt nemotron_h olmo_hybrid openai-gpt qwen3_5_moe_text qwen3_5_text qwen3_next
    recurrent_gemma stablelm xglm zaya
"""
IN_ROWS: Final = tuple(_IN_ROWS.split())
"""Each sequence has a row of its own."""
MODEL_TYPES: Final = (*PACKED, *IN_ROWS)
OWN_EXPERTS: Final = frozenset(("jetmoe", "llama4_text"))
"""Their experts are not behind the interface of transformers, and ranks do not share them."""
NOT_SPLIT: Final = frozenset(("apertus", "inkling_text", "llama4_text"))
"""By transformers' plans for them, tensor ranks do not compute what one process does."""

_REASONS: Final[Mapping[str, str]] = {
    "it is an encoder: its positions see later ones": """
        bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert
        rembert roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl
        xmod
    """,
    "it is half of a model with an encoder": """
        bart bigbird_pegasus blenderbot blenderbot-small marian mbart musicgen musicgen_melody
        mvp pegasus plbart prophetnet trocr whisper
    """,
    "it reads images or sound; of models that see, qwen2_5_vl and qwen3_vl are trained": """
        dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_unified git got_ocr2 llama4 mllama
        moss_transcribe_diarize phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp
    """,
    "it differs from transformers where its sparse attention leaves positions out": """
        axk2 deepseek_v32 glm_moe_dsa
    """,
    "it changes its weights in place where it is not trained": """
        rwkv
    """,
    "it computes bytes and patches of them": """
        blt
    """,
    "it is not compared with transformers yet": """
        cohere_compass_text dbrx doge dots3_note_text gemma3n_text gemma4_assistant
        gemma4_unified_assistant hy_v4 inkling2_text kimi_linear longcat_flash
        minimax_m3_vl_text moshi nemotron phimoe qwen4_exp_text reformer xlnet xlstm zamba
        zamba2
    """,
}
REFUSED: Final[Mapping[str, str]] = {
    model_type: why for why, types in _REASONS.items() for model_type in types.split()
}
"""Why a type is refused."""
