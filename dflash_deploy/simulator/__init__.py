"""A stand-in for a running SGLang server: its flags, log lines and endpoints, with physics of its own.

Started like SGLang, as a process: ``python -m dflash_deploy.simulator <sglang flags>``. The environment says
what machine it plays:

* ``DFLASH_SIM_CARD``: a card of profiles/cards (default ``rtx-5090``);
* ``DFLASH_SIM_SEED``: draws the hidden deviations of this one machine (default 0: none, the published one);
* ``DFLASH_SIM_TIME_SCALE``: simulated seconds in a second of the clock (default 1);
* ``DFLASH_SIM_VERSION``: the SGLang release it plays (default: the newest known);
* ``DFLASH_SIM_FAULT``: what goes wrong, see :mod:`dflash_deploy.simulator.faults`.

Nothing here reads the planner or the tuner: a planner tested against itself would always be right. Every
figure that comes out is simulated. :mod:`dflash_deploy.simulator.virtual` runs the same machine without
HTTP and without waiting.
"""
