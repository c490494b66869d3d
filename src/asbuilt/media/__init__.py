"""Images and sounds as models read them: files, and what a preprocessor_config.json says to do with them."""
