"""Rollout scheduling (§3.2): policies as pure state machines, a simulator, and a dispatcher.

One policy object drives two worlds: `simulate` and the dispatcher in front of real engines send
it the same events and carry out the same actions.
"""
