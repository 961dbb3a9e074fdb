"""What a model costs on given nodes, by arithmetic over its GGUF header: bytes, split, speed. Loads nothing."""
