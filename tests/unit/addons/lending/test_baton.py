from astraflow.addons.lending.baton import Baton, BatonMessage

TAKE_TRAINER = (("trainer", BatonMessage.TAKE),)
TAKE_ROLLOUT = (("rollout", BatonMessage.TAKE),)
GIVE = (("rollout", BatonMessage.GIVE),)


def test_the_trainer_gets_the_device_as_soon_as_the_rollout_service_has_given_it_back() -> None:
    baton = Baton()
    assert baton.want("rollout") == TAKE_ROLLOUT
    assert baton.use == "switch"
    assert baton.begin("rollout") == ()
    assert baton.use == "generate"
    assert baton.want("trainer") == GIVE
    assert baton.use == "switch"
    assert baton.want("rollout") == ()
    assert baton.free("rollout") == TAKE_TRAINER
    assert baton.use == "switch"
    baton.begin("trainer")
    assert baton.use == "train"


def test_a_device_is_lent_again_only_by_a_decision() -> None:
    baton = Baton()
    assert baton.want("trainer") == TAKE_TRAINER
    assert baton.want("rollout") == ()
    assert baton.free("trainer") == ()
    assert baton.use == "idle"
    assert baton.lend(True) == TAKE_ROLLOUT


def test_a_loan_that_ends_early_asks_once_for_the_device() -> None:
    baton = Baton()
    baton.want("rollout")
    assert baton.lend(False) == GIVE
    assert baton.lend(False) == ()
    assert baton.want("trainer") == ()
    assert baton.free("rollout") == TAKE_TRAINER


def test_a_tenant_that_gives_up_its_wish_gets_nothing() -> None:
    baton = Baton()
    baton.want("rollout")
    baton.want("trainer")
    assert baton.free("trainer") == ()
    assert baton.free("rollout") == ()
    assert baton.holder is None


def test_a_tenant_that_is_gone_frees_the_device_for_the_other_one() -> None:
    baton = Baton()
    baton.want("trainer")
    baton.want("rollout")
    baton.free("trainer")
    assert baton.lend(True) == TAKE_ROLLOUT
    baton.want("trainer")
    assert baton.free("rollout") == TAKE_TRAINER
