"""ggml-RPC, llama.cpp's protocol between head and peer. The version is here so that saying it loads nothing more."""

PROTOCOL_VERSION = (7, 0, 0)
