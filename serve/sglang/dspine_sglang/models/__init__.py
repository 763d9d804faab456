"""Model classes; also a package for SGLANG_EXTERNAL_MODEL_PACKAGE=dspine_sglang.models."""
