"""The models of transformers that this project names.

The package's own file imports every model for type checkers, which takes pyright half a minute. All other files of
transformers are as installed: this package of stubs is partial (PEP 561).
"""

from .auto import *
from .gemma3 import *
from .llama import *
