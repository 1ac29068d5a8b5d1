from farspan.cli import main

main()
