"""File formats: what the headers of GGUF and safetensors files say, held against the files before it is believed."""
