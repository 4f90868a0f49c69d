"""How each file format spells a model: config.json, safetensors, GGUF, and names on the Hugging Face hub."""
