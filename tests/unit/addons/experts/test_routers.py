import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from astraflow.addons.experts.routers import find_routers
from astraflow.errors import DataError
from drivers.model_gallery import FAMILIES

UNDERSTOOD = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "deepseek_v2",
    "deepseek_v3",
)


def make_model(model_type: str) -> torch.nn.Module:
    torch.manual_seed(0)
    class_name, sizes = FAMILIES[model_type]
    model = AutoModelForCausalLM.from_config(getattr(transformers, class_name)(**sizes)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("model_type", UNDERSTOOD)
def test_the_weights_of_the_experts_that_a_router_chose_are_those_it_gave_them(model_type: str) -> None:
    routers = find_routers(make_model(model_type))
    assert routers
    for router in routers:
        hidden = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            logits, weights, experts = router.module(hidden)
            assert torch.allclose(router.weights(logits, experts), weights, atol=1e-5)
            assert (router.num_experts, router.num_chosen) == (logits.shape[1], experts.shape[1])


def test_a_model_without_experts_has_no_routers_and_an_unknown_router_is_named() -> None:
    assert find_routers(make_model("qwen3")) == ()
    with pytest.raises(DataError, match=r"Llama4ForCausalLM .*mixture of experts"):
        find_routers(make_model("llama4_text"))
