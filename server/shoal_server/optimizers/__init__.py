"""Update rules and the compiled kernels that apply them."""
