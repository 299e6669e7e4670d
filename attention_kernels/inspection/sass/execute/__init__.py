"""Execute the machine code of some blocks, to see what their warps do: work.py."""
