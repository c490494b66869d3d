"""The few computations that are more than one library call: a plain reference beside each fast path."""
