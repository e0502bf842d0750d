def pinned_parts(eqn, pins, donor_of):
    pin = pins.pin(eqn)
    pins.bind(eqn, pin)
    yield eqn, pin
