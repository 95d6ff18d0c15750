"""Categories follow from roles and lives."""

import numpy as np

from evenload.ledger.categories import derive
from evenload.ledger.ledger import ALIVE
from evenload.ledger.words import CATEGORIES, Category, Phase, Role


def category(*, roles=Role.NONE, phase=Phase.FORWARD, allocated=5, freed=ALIVE, begins=(10, 20)):
    codes = derive(
        roles=np.array([roles], dtype=np.uint16),
        phase=np.array([phase.code], dtype=np.uint8),
        allocated=np.array([allocated]),
        freed=np.array([freed]),
        backward_begins=np.array(begins, dtype=np.int64),
    )
    return CATEGORIES[codes[0]]


def test_what_forward_makes_and_backward_finds_is_kept_for_it():
    assert category(freed=11) is Category.ACTIVATION
    assert category(freed=10) is Category.ACTIVATION
    assert category(freed=9) is Category.TEMPORARY


def test_only_the_backward_that_follows_counts():
    assert category(allocated=12, freed=19) is Category.TEMPORARY
    assert category(allocated=12, freed=21) is Category.ACTIVATION
    assert category(allocated=25) is Category.TEMPORARY
    assert category(begins=()) is Category.TEMPORARY


def test_recomputation_keeps_for_backward_too():
    assert category(phase=Phase.RECOMPUTE, allocated=15, freed=20) is Category.ACTIVATION
    assert category(phase=Phase.RECOMPUTE, allocated=15, freed=18) is Category.TEMPORARY


def test_what_backward_or_the_optimizer_makes_is_temporary_unless_someone_holds_it():
    for phase in (Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER):
        assert category(phase=phase) is Category.TEMPORARY
        assert category(phase=phase, roles=Role.GRADIENT) is Category.GRADIENT
        assert category(phase=phase, roles=Role.OPTIMIZER) is Category.OPTIMIZER
        assert category(phase=phase, roles=Role.PARAMETER | Role.GRADIENT) is Category.PARAMETER


def test_a_backward_that_is_recorded_for_another_one_keeps_like_forward():
    assert category(phase=Phase.BACKWARD, roles=Role.GRAPH, allocated=12) is Category.ACTIVATION


def test_a_gathered_activation_is_an_activation_and_a_gathered_parameter_is_a_buffer():
    assert category(roles=Role.COLLECTIVE) is Category.ACTIVATION
    assert category(roles=Role.COLLECTIVE, freed=9) is Category.COMMUNICATION
    assert category(roles=Role.BUFFER) is Category.COMMUNICATION
    assert category(roles=Role.BUFFER | Role.GRADIENT) is Category.GRADIENT


def test_an_input_comes_from_outside_the_phases():
    assert category(roles=Role.INPUT, phase=Phase.OTHER) is Category.INPUT
    assert category(roles=Role.INPUT, phase=Phase.FORWARD) is Category.ACTIVATION
    assert category(phase=Phase.OTHER) is Category.TEMPORARY
