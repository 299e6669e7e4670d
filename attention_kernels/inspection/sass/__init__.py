"""Predict a kernel from its machine code (SASS), without a GPU: predict.py, in four steps.

decode.py parses the code of a version, or of a file that binary.py reads. execute.py executes some
blocks of a launch, which work.py chooses. multiprocessor.py times them on a model of one
multiprocessor, and predict.py the grid on all. explain.py says which source lines the warps wait
at.
"""
