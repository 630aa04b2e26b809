"""GGUF block formats: quantize and dequantize."""
