"""The exceptions that gpt2_infer raises on purpose: each message is a sentence for the user."""


class GPT2InferError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(GPT2InferError):
    """An invalid or unsupported model configuration."""


class WeightsError(GPT2InferError):
    """Weights that cannot be found, read or matched to the configuration."""


class UnavailableDeviceError(GPT2InferError):
    """A device that this machine does not have."""


class NotFiniteError(GPT2InferError, ArithmeticError):
    """The model computed NaN or infinity, from which no token can be chosen."""


class RequestError(GPT2InferError, ValueError):
    """A request that cannot be met: a wrong prompt, length or sampling value."""
