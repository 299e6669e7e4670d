"""Predict a kernel from its machine code (SASS), without a GPU: predict.py, in four steps.

decode.py parses the code that program.py compiles or binary.py finds in a file. execute.py executes
some blocks of a launch, which grid.py chooses. timing.py times them on a model of one
multiprocessor, and the grid on all. explain.py says which source lines the warps wait at.
"""
