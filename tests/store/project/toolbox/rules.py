"""An optimizer of the user's own."""

import jax
import optax

FACTOR = 0.5


def damped(learning_rate, momentum=0.9, nesterov=False):
    """Gradient descent with momentum whose steps are scaled."""

    def scale(updates):
        return jax.tree.map(lambda update: FACTOR * update, updates)

    return optax.chain(
        optax.trace(momentum, nesterov),
        optax.stateless(lambda updates, _: scale(updates)),
        optax.scale_by_learning_rate(learning_rate),
    )
