"""What a machine holds, how fast it goes and what training takes, from the declarations of the parts; no torch."""
