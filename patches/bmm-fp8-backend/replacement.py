import os as _dflash_deploy_os


def _dflash_deploy_bmm_fp8_backend(default):
    """The back end that this server's environment names, else the one that the patch was applied with."""
    variable = "DFLASH_BMM_FP8_BACKEND"
    choices = ("cublas", "cudnn", "cutlass", "auto")
    named = _dflash_deploy_os.environ.get(variable) or default
    if named not in choices:
        raise ValueError(
            f"{variable}={named!r} names no back end of FlashInfer's bmm_fp8: expected one of "
            f"{', '.join(choices)}; unset, it is {default} (dflash-deploy patch bmm-fp8-backend)"
        )
    return named


# Read once, as the server starts: what is compiled and captured later has one answer, and a wrong name
# ends the start, not a request.
_DFLASH_DEPLOY_BMM_FP8_BACKEND = _dflash_deploy_bmm_fp8_backend("${backend}")
