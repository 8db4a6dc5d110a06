from hypothesis import settings

# How long an example takes says nothing on a busy machine.
settings.register_profile("longhaul", deadline=None)
settings.load_profile("longhaul")
