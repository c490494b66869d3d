"""How published weights are packed: each way of packing that a config may state, as the bytes of a weight."""
