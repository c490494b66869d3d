"""Small models written in llama.cpp's conventions with the gguf library, and what llama.cpp itself makes of them."""
