"""What families have in common: the reader of configs, tables of tensors, and pieces that several are made of."""
