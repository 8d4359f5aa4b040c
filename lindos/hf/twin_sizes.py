"""Sizes of twins: the names that configurations give a size, small values for them, and what single types bind."""

from __future__ import annotations

from typing import Any

# Generic word -> the names that configurations give it.
WORDS: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "adapter_in_dim", "adapter_input_size", "n_embd", "d_model", "word_embed_proj_dim",
               "embedding_dim", "emb_dim",
               "lru_width"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers",
               "num_blocks", "encoder_layers", "num_encoder_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "decoder_attention_heads",
              "num_decoder_attention_heads", "encoder_attention_heads", "num_encoder_attention_heads",
              "swa_num_attention_heads", "num_attention_heads_per_layer"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads", "num_query_groups"),
    "head_dim": ("head_dim", "d_head", "d_kv", "dim_head", "swa_head_dim", "attention_head_size",
                 "query_pre_attn_scalar"),
    "intermediate": ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "d_ff", "dff",
                     "dim_ff",
                     "ffn_hidden_size", "d_inner", "feed_forward_size", "dense_intermediate_size"),
    "expert_intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_intermediate": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
                            "shared_intermediate_size", "shared_experts_intermediate_size",
                            "intermediate_size_mlp"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "vocabulary": ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "unpadded_vocab_size"),
    "positions": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length",
                  "context_length", "max_target_positions"),
    "window": ("sliding_window", "sliding_window_size", "window_size", "attention_window_size", "local_attention",
               "attention_chunk_size"),
    "tied": ("tie_word_embeddings",),
}  # fmt: skip

SIZES = {"layers": 2, "heads": 4, "intermediate": 112, "expert_intermediate": 40, "shared_intermediate": 56,
         "experts": 4, "top_k": 2, "vocabulary": 131, "positions": 128, "window": 5}  # fmt: skip

# Further sizes of single families. A default below the value stays (one group stays one group).
SMALL = {
    "q_lora_rank": 20, "kv_lora_rank": 28, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "n_group": 2, "num_expert_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "index_block_size": 4, "index_topk_blocks": 2,
    "mamba_d_state": 10, "mamba_n_heads": 4, "mamba_num_heads": 4, "mamba_d_head": 24, "mamba_head_dim": 24,
    "mamba_d_ssm": 96, "mamba_dt_rank": 6, "time_step_rank": 6, "state_size": 10, "ssm_state_size": 10,
    "mamba_n_groups": 2, "n_groups": 2, "mamba_chunk_size": 8, "chunk_size": 8, "n_mamba_heads": 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 14,
    "linear_num_heads": 4, "linear_head_dim": 12, "rotary_dim": 8, "block_size": 8, "embedding_size": 36,
    "hidden_size_per_layer_input": 12, "laurel_rank": 6, "num_kv_shared_layers": 0, "o_lora_rank": 20, "o_groups": 2,
    "d_rel": 4, "rel_extent": 16, "log_scaling_n_floor": 8, "floor_scale": 8, "no_rope_layer_interval": 2,
    "zero_expert_num": 2, "router_hidden_size": 24, "num_layers_per_stack": 2, "gated_norm_rank": 6,
    "keep_window_size": 8, "block_multiple_of": 8, "kv_channels": 16, "hc_lowrank": 12, "hc_sinkhorn_iters": 3,
    "input_embedding_size": 36, "loop_gate_rank": 6, "output_embedding_size": 40, "pronunciation_embed_dim": 20,
    "pronunciation_vocab_size": 31, "shape_embed_dim": 28, "shape_vocab_size": 37, "image_size": 32, "patch_size": 8,
    "num_mel_bins": 8, "max_source_positions": 20, "encoder_hash_byte_group_vocab": 50,
    "local_attention_window_len": 8, "position_bias_num_buckets": 16, "position_bias_max_distance": 64, "depth": 2,
    "prompt_length": 4, "codebook_size": 64, "adapter_rank": 6, "scale_emb": 4, "dim_model_base": 16,
    "layer_group_size": 2, "ext_pw_out_channel": 36, "depthwise_separable_out_channel": 40, "nemo_conv_channels": 32,
    "output_channels": 24, "mlp_dim": 88, "backbone_hidden_size": 40,
}  # fmt: skip

# By class of configuration: kinds of layers that follow from a period instead of a list, sizes that bind each other
# (functions of the generic sizes), and defaults that transformers itself cannot build.
SPECIAL: dict[str, dict[str, Any]] = {
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "BambaConfig": {"mamba_d_head": lambda sizes: sizes["hidden"] // 2},
    "GraniteMoeHybridConfig": {"mamba_d_head": lambda sizes: sizes["hidden"] // 2},
    "FalconH1Config": {"mamba_d_head": 24},
    "Mamba2Config": {"head_dim": lambda sizes: 2 * sizes["hidden"] // sizes["heads"]},
    "XLNetConfig": {"d_head": lambda sizes: sizes["hidden"] // sizes["heads"]},
    "HeliumConfig": {"head_dim": lambda sizes: sizes["hidden"] // sizes["heads"]},
    "Dots1Config": {"n_shared_experts": 1, "n_routed_experts": lambda sizes: sizes["experts"]},
    "Lfm2MoeConfig": {"layer_types": lambda sizes: (["conv", "full_attention"] * sizes["layers"])[: sizes["layers"]]},
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "XmodConfig": {"default_language": "en_XX"},
    "BltPatcherConfig": {"hidden_size": lambda sizes: sizes["heads"] * sizes["head_dim"]},
    "BltGlobalTransformerConfig": {"hidden_size": lambda sizes: sizes["heads"] * 24, "head_dim": 24},
    "BltLocalDecoderConfig": {
        "hidden_size": lambda sizes: sizes["heads"] * sizes["head_dim"],
        "hidden_size_global": lambda sizes: sizes["heads"] * 24,
    },
    "DistilBertConfig": {"hidden_dim": lambda sizes: sizes["intermediate"]},
    "Dots3NoteTextConfig": {"head_dim": 32},  # 24 without rotary and 8 with it, in layers with a window
    # Its scales are stored as s and used as s * s_init / range: at the default 0.0177 a step of AdamW moves them 50 x.
    "DoryConfig": {
        "initializer_range": 0.5,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_layers": lambda sizes: sizes["layers"] - 2,
    },
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    **{
        name: {
            "embed_dim": 24,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "image_size": 32,
            "patch_size": 4,
            "window_size": 4,
        }
        for name in ("SwinConfig", "Swinv2Config", "DonutSwinConfig")
    },
    **{
        name: {
            "num_stages": 4,
            "hidden_sizes": [24, 36, 48, 60],
            "depths": [1, 2, 1, 1],
            "image_size": 64,
            "patch_size": 4,
        }
        for name in ("ConvNextConfig", "ConvNextV2Config")
    },
    "SqueezeBertConfig": {"embedding_size": lambda sizes: sizes["hidden"]},
    "ZambaConfig": {
        "attention_hidden_size": lambda sizes: 2 * sizes["hidden"],
        "attention_head_dim": lambda sizes: 2 * sizes["hidden"] // sizes["heads"],
        "layers_block_type": lambda sizes: (["linear_attention", "hybrid"] * sizes["layers"])[: sizes["layers"]],
    },
    "ReformerConfig": {
        "attention_head_size": 16,
        "axial_pos_shape": (4, 6),
        "axial_pos_embds_dim": lambda sizes: (16, sizes["hidden"] - 16),
        "max_position_embeddings": 24,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
        "hash_seed": 5,
    },
}

# Layers that a type needs so that each relation between its layers occurs (what they share, loops).
LEAST_LAYERS = {"ZambaConfig": 4, "DoryConfig": 3, "RecurrentGemmaConfig": 3}

# Where a type's defaults make no configuration: what a configuration of it needs.
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
                                         "vocab_size_per_layer_input": 0}},
}  # fmt: skip

TEXT = ("text_config", "decoder")  # fields that hold the configuration of the text model
OUTWARD = ("adapter_out_dim", "out_hidden_size")  # sizes of a part that must fit the text model

# Fields that list the layers of one kind by number.
NUMBERED = ("moe_layers", "full_attn_idxs", "hybrid_layer_ids", "mlp_only_layers", "ple_layer_ids")
