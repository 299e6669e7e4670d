"""`python -m gpt2_infer` is `gpt2-infer`."""

from gpt2_infer.warm import program

if __name__ == "__main__":
    raise SystemExit(program())
