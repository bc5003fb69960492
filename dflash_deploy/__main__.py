from dflash_deploy.cli import main

main()
