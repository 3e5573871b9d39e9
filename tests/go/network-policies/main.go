// The engine of kube-network-policies for one node, run beside a cluster instead of in it: it asks the kernel for the first
// packet of each connection of the node's pods (NFQUEUE) and gives the verdict of the cluster's NetworkPolicies.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/kube-network-policies/pkg/networkpolicy"
)

func main() {
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(node string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	config, err := clientcmd.BuildConfigFromFlags("", os.Getenv("KUBECONFIG"))
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	watched := informers.NewSharedInformerFactory(client, 0)
	controller, err := networkpolicy.NewController(
		client,
		watched.Networking().V1().NetworkPolicies(),
		watched.Core().V1().Namespaces(),
		watched.Core().V1().Pods(),
		nil, nil, nil, nil,
		networkpolicy.Config{NodeName: node},
	)
	if err != nil {
		return err
	}
	watched.Start(ctx.Done())
	return controller.Run(ctx)
}
