"""The functions that a person calls: each takes whatever names a model, and gives an object that shows itself."""
