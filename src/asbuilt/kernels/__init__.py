"""The few computations that need more than one library call: a plain reference beside each fast path."""
