"""Running a built model: caches, sampling, decoding, text as it comes."""
