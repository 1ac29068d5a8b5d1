"""farspan's model. Importing this package registers the type "farspan" with transformers."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from farspan.model.config import FarspanConfig
from farspan.model.transformer import FarspanForCausalLM, FarspanModel

AutoConfig.register("farspan", FarspanConfig, exist_ok=True)
AutoModel.register(FarspanConfig, FarspanModel, exist_ok=True)
AutoModelForCausalLM.register(FarspanConfig, FarspanForCausalLM, exist_ok=True)

__all__ = ["FarspanConfig", "FarspanForCausalLM", "FarspanModel"]
