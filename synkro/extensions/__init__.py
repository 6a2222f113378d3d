"""Update rules, and training steps that are one call.

A rule works on all parameters at once, as one flat vector, and so does the all-reduce of their
gradients::

    rule = adam([w, b], learning_rate=0.01)
    train = make_train_function(loss_and_grad, [w, b], rule)
    loss = train(x, y, batch=rows)

where ``loss_and_grad(x, y)`` reads ``w.value`` and ``b.value`` and returns the mean loss over its rows,
and a list of the gradients.  For a PyTensor graph the loss suffices::

    train = make_train_function(loss, [w, b], x, y, rule)

where *w* and *b* are shared variables of PyTensor's, and *x* and *y* inputs of the graph.  And for a
module of PyTorch's, with an optimizer of PyTorch's::

    train = make_train_function(module, cross_entropy, optimizer)
    loss = train(x, y, batch=rows)

Programs for Synkhronos have another form of the one for graphs, in which a rule takes the loss::

    from synkro.extensions import train, updates

    step = train.make_train_function(loss, [w, b], x, y, updates.adam, learning_rate=0.01)

::

    train     ``make_train_function`` in the classic form
    updates   the update rules in the classic form
    training  ``make_train_function``
    modules   … of a module of PyTorch's
    rules     the update rules: their formulas, constants and defaults
"""

from .rules import Rule, adadelta, adagrad, adam, adamax, momentum, nesterov_momentum, rmsprop, sgd
from .training import flatten, make_train_function

__all__ = ["Rule", "adadelta", "adagrad", "adam", "adamax", "flatten", "make_train_function"]
__all__ += ["momentum", "nesterov_momentum", "rmsprop", "sgd"]
