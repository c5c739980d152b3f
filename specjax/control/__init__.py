"""Which strategy next: controllers that watch chunks and choose between them."""

from specjax.control.bandit import Bandit, BanditConfig
from specjax.control.base import OFF, Controller, Observation, Static, slower_than_plain
from specjax.control.config import ControlConfig, make_controller
from specjax.control.costs import CostTable
from specjax.control.ema import EmaConfig, EmaTiers
from specjax.control.goodput import Goodput, GoodputConfig

__all__ = [
    "OFF",
    "Bandit",
    "BanditConfig",
    "ControlConfig",
    "Controller",
    "CostTable",
    "EmaConfig",
    "EmaTiers",
    "Goodput",
    "GoodputConfig",
    "Observation",
    "Static",
    "make_controller",
    "slower_than_plain",
]
